// The path for every machine.
#include <cmath>

#include "common/element.h"
#include "matmul/rows.h"

namespace graphrot {
namespace {

template <class T>
void run(const RowsProblem& problem, const void* in, std::size_t rows, const QuantizedRows& out, float* scratch) {
  const T* x = static_cast<const T*>(in);
  const std::size_t channels = problem.channels, groups = (channels + problem.group - 1) / problem.group;
  const auto levels = static_cast<float>(problem.levels);
  for (std::size_t row = 0; row < rows; ++row, x += channels) {
    std::int8_t* codes = out.codes + row * out.stride;
    std::int32_t* sums = out.sums + row * groups;
    for (std::size_t i = 0; i < rows_stride(channels); ++i) codes[i] = 0;
    for (std::size_t g = 0; g < groups; ++g) sums[g] = 0;
    for (std::size_t i = 0; i < channels; ++i) scratch[i] = to_float(x[i]);
    if (problem.rotation != nullptr) {
      hadamard_scalar().run[static_cast<int>(Element::kFloat)](*problem.rotation, scratch, scratch,
                                                               channels / problem.rotation->size, scratch + rows_stride(channels));
    }
    float largest = 0.0f;
    bool finite = true;
    for (std::size_t i = 0; i < channels; ++i) {
      finite = finite && std::isfinite(scratch[i]);
      largest = std::fmax(largest, std::fabs(scratch[i]));
    }
    const float scale = std::fmax(largest, kRowEpsilon) / levels;
    out.scales[row] = finite ? scale : std::nanf("");
    if (!finite) continue;
    for (std::size_t i = 0; i < channels; ++i) {
      const auto code = static_cast<std::int32_t>(std::nearbyint(scratch[i] / scale));
      codes[i] = static_cast<std::int8_t>(code > problem.levels ? problem.levels : code < -problem.levels ? -problem.levels : code);
      sums[i / problem.group] += codes[i];
    }
  }
}

constexpr RowsKernels kKernels = {{&run<float>, &run<Half>, &run<BFloat16>}};

}  // namespace

const RowsKernels& rows_scalar() { return kKernels; }

}  // namespace graphrot
