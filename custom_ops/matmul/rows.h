// Rows of activations to integers: an optional Hadamard transform, one symmetric scale per row, int8 codes.
// z = transform(x); s = max(max|z|, kRowEpsilon) / levels; code = z / s, rounded half to even. The rotated row
// exists only in `scratch`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/element.h"
#include "common/isa.h"
#include "hadamard/hadamard.h"

namespace graphrot {

// Least largest magnitude of a row: EPSILON of graphrot/quant/activations.py.
inline constexpr float kRowEpsilon = 1e-5f;

// Codes of a row are stored to a multiple of this many bytes.
inline constexpr std::size_t kRowAlignment = 64;

struct RowsProblem {
  const HadamardProblem* rotation;  // null: none; else `channels` is a multiple of its size
  std::size_t channels;             // K
  std::size_t group;                // channels that share a scale of the weights; K for one scale per column
  int levels;                       // largest code: 127 or 7
};

// Throws std::invalid_argument, in words for people, when the levels or the transform do not go with the rows.
void check_rows(const RowsProblem& problem);

// K rounded up to kRowAlignment: the least stride of codes.
inline constexpr std::size_t rows_stride(std::size_t channels) {
  return (channels + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

struct QuantizedRows {
  std::int8_t* codes;   // [rows][stride]; rows_stride(K) bytes of a row are written, those after K are zero
  std::size_t stride;   // bytes, at least rows_stride(K)
  float* scales;        // [rows]; NaN for a row whose transform is not finite: its codes are zero
  std::int32_t* sums;   // [rows][ceil(K / group)]: sums of codes
};

// `in` holds rows of K contiguous elements. `scratch` holds rows_scratch_floats() floats, aligned to 64 bytes.
using RowsRun = void (*)(const RowsProblem& problem, const void* in, std::size_t rows, const QuantizedRows& out,
                         float* scratch);

struct RowsKernels {
  RowsRun run[kElementCount];  // indexed by Element
};

const RowsKernels& rows_scalar();
#if GRAPHROT_X86
const RowsKernels& rows_avx2();
const RowsKernels& rows_avx512();
#endif
const RowsKernels& rows_kernels(Isa isa);

std::size_t rows_scratch_floats(const RowsProblem& problem);

}  // namespace graphrot
