// The transform on CUDA: y = scale * x * (F (x) S) over blocks of size = K * 2^levels channels, as in hadamard.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cuda/runtime.h"
#include "common/element.h"
#include "hadamard/hadamard.h"

namespace graphrot {

struct CudaHadamard {
  std::size_t size, order, levels;
  float scale;
  const void* factor;  // the bytes of cuda_factor() on the device; null where the order is 1
};

// `factor` is row-major [order, order]. What a device reads instead: rows padded with zeros to a multiple of this.
inline constexpr std::size_t kCudaFactorPad = 8;
std::vector<std::uint8_t> cuda_factor(std::size_t order, const std::vector<float>& factor);

inline CudaHadamard cuda_hadamard(const HadamardProblem& problem, const void* factor) {
  return {problem.size, problem.order, problem.levels, problem.scale, factor};
}

// Throws std::invalid_argument, in words for people, where a block of threads cannot hold a block of channels.
void check_cuda_hadamard(std::size_t size, std::size_t order, const CudaDevice& device);

// `blocks` contiguous blocks from `in` to `out`, which are the same memory or do not overlap.
void hadamard_cuda(const CudaHadamard& problem, Element element, const void* in, void* out, std::size_t blocks,
                   CudaStream stream);

}  // namespace graphrot
