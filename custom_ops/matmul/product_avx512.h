// What the paths with 512-bit vectors have in common: outputs from totals, and what a group starts from.
// Included by files of one instruction set; everything is in an unnamed namespace (see hadamard/avx2.cc).
#pragma once

#include <immintrin.h>

#include "matmul/product_blocks.h"

namespace graphrot {
namespace {

constexpr int kVectors = 4;  // of 16 columns in a tile

inline void put(__m512 v, __mmask16 columns, float* to) { _mm512_mask_storeu_ps(to, columns, v); }

inline void put(__m512 v, __mmask16 columns, Half* to) {
  _mm256_mask_storeu_epi16(to, columns, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline void put(__m512 v, __mmask16 columns, BFloat16* to) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_mask_storeu_epi16(to, columns, _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
}

// One row of outputs, those of the tile that are below N.
template <class T>
inline void finish_row(const ProductProblem& problem, std::size_t tile, float scale, const float* totals, T* out) {
  const __m512 by = _mm512_set1_ps(scale);
  const std::size_t start = tile * kTileColumns;
  for (std::size_t column = start; column < start + kTileColumns && column < problem.columns; column += 16) {
    const std::size_t left = problem.columns - column;
    const __mmask16 columns = left < 16 ? static_cast<__mmask16>((1u << left) - 1) : static_cast<__mmask16>(0xffff);
    const __m512 bias = problem.bias != nullptr ? _mm512_loadu_ps(problem.bias + column) : _mm512_setzero_ps();
    put(_mm512_fmadd_ps(_mm512_loadu_ps(totals + (column - start)), by, bias), columns, out + column);
  }
}

// -zero * (sum of the row's codes in the group), to which the products are added.
template <int Rows>
inline void start_group(const ProductProblem& problem, std::size_t tile, std::size_t group, const std::int32_t* sums,
                        __m512i (&sum)[Rows][kVectors]) {
  if (problem.zeros == nullptr) {
    for (int r = 0; r < Rows; ++r) {
      const __m512i all = _mm512_set1_epi32(-problem.zero * sums[static_cast<std::size_t>(r) * problem.groups + group]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = all;
    }
    return;
  }
  const std::uint8_t* zeros = problem.zeros + (tile * problem.groups + group) * kTileColumns;
  for (int v = 0; v < kVectors; ++v) {
    const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + 16 * v)));
    for (int r = 0; r < Rows; ++r) {
      const __m512i negative = _mm512_set1_epi32(-sums[static_cast<std::size_t>(r) * problem.groups + group]);
      sum[r][v] = _mm512_mullo_epi32(zero, negative);
    }
  }
}

// Sums of a group that goes on in the next block of channels.
template <int Rows>
inline void load_sums(const float* totals, __m512i (&sum)[Rows][kVectors]) {
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_loadu_si512(totals + (4 * r + v) * 16);
  }
}

template <int Rows>
inline void store_sums(const __m512i (&sum)[Rows][kVectors], float* totals) {
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_si512(totals + (4 * r + v) * 16, sum[r][v]);
  }
}

// totals = scales * sums, plus the totals of the groups before.
template <int Rows>
inline void scale_group(const ProductProblem& problem, std::size_t tile, std::size_t group,
                        const __m512i (&sum)[Rows][kVectors], float* totals) {
  const float* scales = problem.scales + (tile * problem.groups + group) * kTileColumns;
  for (int v = 0; v < kVectors; ++v) {
    const __m512 scale = _mm512_loadu_ps(scales + 16 * v);
    for (int r = 0; r < Rows; ++r) {
      float* to = totals + static_cast<std::size_t>(r) * kTileColumns + 16 * v;
      const __m512 before = group == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][v]), scale, before));
    }
  }
}

}  // namespace
}  // namespace graphrot
