// The product of matmul/product.h on CUDA: the same bits as the CPU's paths with fused multiply-add, given the same
// codes. Weights are read as they lie in the storage of MatMulNBits; nothing is repacked, nothing is kept twice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"
#include "common/element.h"
#include "matmul/rows_cuda.h"

namespace graphrot {

// As WeightSource of matmul/weights.h, but in the memory of the device, at addresses that are multiples of 16.
struct CudaProduct {
  std::size_t channels;       // K
  std::size_t columns;        // N
  std::size_t group;          // channels that share a scale; K for one scale per column
  std::size_t groups;         // ceil(K / group)
  std::size_t block;          // block length of the storage: the group, or for one scale per column any
  int bits;                   // 4 or 8
  int zero;                   // 8 or 128: the code of zero where `zeros` is null
  const std::uint8_t* codes;  // [N, ceil(K / block), block * bits / 8], low half first
  const void* scales;         // [N, groups] of Half or float
  bool half_scales;
  const std::uint8_t* zeros;  // [N, ceil(ceil(K / block) * bits / 8)], or null; with one scale, the first counts
  const float* bias;          // [N], or null
};

// Throws std::invalid_argument, in words for people, when the numbers do not fit together or the device cannot do it.
void check_cuda_product(const CudaProduct& product, const CudaDevice& device);

// How a product is cut up, from few rows to many.
enum class CudaProductKernel { kGemv, kSmall, kMiddle, kLarge };
inline constexpr CudaProductKernel kCudaProductKernels[] = {CudaProductKernel::kGemv, CudaProductKernel::kSmall,
                                                            CudaProductKernel::kMiddle, CudaProductKernel::kLarge};
inline constexpr std::size_t kCudaGemvRows = 8;  // at most

CudaProductKernel choose_cuda_product(const CudaProduct& product, std::size_t rows, const CudaDevice& device);

// Working memory of the product: sums stay within a block, so that there is none.
inline std::size_t product_cuda_scratch_bytes(const CudaProduct&, std::size_t) { return 0; }

// `rows` rows of codes to `out` [rows, N]. Codes for 4-bit weights are interleaved (CudaRowsProblem), those for 8-bit
// weights are not. Nothing is waited for.
void product_cuda(const CudaProduct& product, const CudaRows& codes, Element element, std::size_t rows, void* out,
                  void* scratch, CudaStream stream);

// The same by the kernel that is named; kGemv takes kCudaGemvRows rows at most.
void product_cuda_by(CudaProductKernel kernel, const CudaProduct& product, const CudaRows& codes, Element element,
                     std::size_t rows, void* out, CudaStream stream);

}  // namespace graphrot
