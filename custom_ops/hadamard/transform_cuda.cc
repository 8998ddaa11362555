#include "hadamard/transform_cuda.h"

#include <cstdint>
#include <vector>

#include "ort/glue.h"

namespace graphrot {
namespace {

std::vector<std::uint8_t> checked_factor(const ort::Api& api, const ort::KernelInfo* info,
                                         const HadamardProblem& problem) {
  check_cuda_hadamard(problem.size, problem.order, current_device());
  if (problem.order == 1) return {};  // its sign is part of the scale
  return cuda_factor(problem.order, ort::attribute_tensor(api, info, "factor").values);
}

}  // namespace

CudaTransform::CudaTransform(const ort::DeviceAllocator& allocator, const ort::KernelInfo* info,
                             const HadamardProblem& problem)
    : factor_(allocator, checked_factor(allocator.api(), info, problem)),
      problem_(cuda_hadamard(problem, factor_.data())) {}

}  // namespace graphrot
