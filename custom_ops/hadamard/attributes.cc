#include "hadamard/attributes.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort/glue.h"

namespace graphrot {

HadamardTransform read_transform(const ort::Api& api, const ort::KernelInfo* info) {
  const ort::TensorAttribute factor = ort::attribute_tensor(api, info, "factor");
  if (factor.shape.size() != 2 || factor.shape[0] != factor.shape[1]) {
    throw std::invalid_argument("attribute 'factor' must be a square matrix");
  }
  return HadamardTransform(ort::attribute_int(api, info, "size"), factor.values, factor.shape[0],
                           ort::attribute_float(api, info, "scale"));
}

// `left` and `right` serve the function body alone. They are checked here because a node whose two forms
// disagree would answer differently from one machine to the next.
void check_body_attributes(const ort::Api& api, const ort::KernelInfo* info, const HadamardProblem& problem) {
  const std::int64_t width = std::int64_t{1} << problem.levels;
  std::int64_t orders[2] = {0, 0};
  const char* const names[2] = {"left", "right"};
  for (int side = 0; side < 2; ++side) {
    const ort::TensorAttribute matrix = ort::attribute_tensor(api, info, names[side]);
    bool good = matrix.shape.size() == 2 && matrix.shape[0] == matrix.shape[1];
    for (std::size_t i = 0; good && i < matrix.values.size(); ++i) {
      const auto order = static_cast<std::size_t>(matrix.shape[0]);
      bool odd = false;
      for (std::size_t common = (i / order) & (i % order); common != 0; common &= common - 1) odd = !odd;
      good = matrix.values[i] == (odd ? -1.0f : 1.0f);
    }
    if (!good) throw std::invalid_argument("attribute '" + std::string(names[side]) + "' must be a Sylvester matrix");
    orders[side] = matrix.shape[0];
  }
  const auto order = static_cast<std::int64_t>(problem.order);
  if (orders[0] * orders[1] != width ||
      ort::attribute_ints(api, info, "shape") != std::vector<std::int64_t>{-1, order, orders[0], orders[1]} ||
      ort::attribute_ints(api, info, "shape3") != std::vector<std::int64_t>{-1, order, width}) {
    throw std::invalid_argument("attributes 'left', 'right', 'shape', 'shape3' and 'size' do not fit together");
  }
}

}  // namespace graphrot
