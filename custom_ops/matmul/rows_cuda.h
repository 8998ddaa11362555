// Rows of activations to integers on CUDA, in one kernel: an optional transform, one symmetric scale per row, int8
// codes and their sums, by the rules of rows.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"
#include "common/element.h"
#include "hadamard/cuda.h"

namespace graphrot {

struct CudaRowsProblem {
  const CudaHadamard* rotation;  // null: none; else `channels` is a multiple of its size
  std::size_t channels;          // K
  std::size_t group;             // channels that share a scale of the weights; K for one scale per column
  int levels;                    // largest code: 127 or 7
  // Of 32 codes the order is 0, 2, ... 30, 1, 3, ... 31: low halves of 4-bit weights meet the first sixteen, high halves
  // the others, and both are what ldmatrix reads for one mma.
  bool interleaved;
};

// As QuantizedRows, on the device. `stride` is a multiple of kRowAlignment and `codes` aligned to 16 bytes.
struct CudaRows {
  std::int8_t* codes;
  std::size_t stride;
  float* scales;
  std::int32_t* sums;
};

// Throws std::invalid_argument, in words for people, where a block of threads cannot hold a rotated row.
void check_cuda_rows(const CudaRowsProblem& problem, const CudaDevice& device);

void rows_cuda(const CudaRowsProblem& problem, Element element, const void* in, std::size_t rows, const CudaRows& out,
               CudaStream stream);

}  // namespace graphrot
