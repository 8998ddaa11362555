#include "hadamard/call.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort/glue.h"

namespace graphrot {

HadamardCall read_hadamard_call(const ort::Api& api, ort::KernelContext* context, std::size_t size) {
  const ort::KernelContext* seen = context;
  const ort::Value* input = nullptr;
  ort::check(api, api.call<ort::slot::KernelContext_GetInput>(seen, std::size_t{0}, &input));
  const std::vector<std::int64_t> shape = ort::shape_of(api, input, nullptr);
  if (shape.empty() || shape.back() % static_cast<std::int64_t>(size) != 0) {
    throw std::invalid_argument("the last axis of the input has " + (shape.empty() ? "no" : std::to_string(shape.back())) +
                                " channels, which is no multiple of size " + std::to_string(size));
  }
  ort::Value* output = nullptr;
  ort::check(api, api.call<ort::slot::KernelContext_GetOutput>(context, std::size_t{0}, shape.data(), shape.size(), &output));
  std::size_t elements = 1;
  for (const std::int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
  HadamardCall call{};
  call.blocks = elements / size;
  if (call.blocks == 0) return call;
  call.in = ort::data_of(api, input);
  call.out = ort::mutable_data_of(api, output);
  return call;
}

}  // namespace graphrot
