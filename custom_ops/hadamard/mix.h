// The factor's half of the transform, over a vector type V (see panel.h): out[r, :] = sum over k of F[k, r] * in[k, :],
// rows of `stride` floats, a multiple of 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hadamard/hadamard.h"

#if defined(_MSC_VER)
#define GRAPHROT_INLINE __forceinline
#else
#define GRAPHROT_INLINE inline __attribute__((always_inline))
#endif

namespace graphrot::panel {

template <class V>
constexpr std::size_t width() {
  return std::size_t{1} << V::kLevels;
}

// Where no largest magnitude is asked for.
struct NoPeak {
  template <class V>
  void add(const V&) {}
};

// Any factor: a product of matrices, in tiles of 4 rows by two vectors.
template <class V, class T, class Peak>
inline void mix(const HadamardProblem& problem, const float* in, T* out, std::size_t stride, Peak& peak) {
  constexpr int kRows = 4;
  const std::size_t order = problem.order;
  Peak local = peak;
  const std::size_t second = stride > width<V>() ? width<V>() : 0;  // one vector alone is done twice
  for (std::size_t column = 0; column < stride; column += 2 * width<V>()) {
    const float* factor = problem.factor;
    for (std::size_t row = 0; row < order; row += kRows) {
      V low[kRows], high[kRows];
      for (int r = 0; r < kRows; ++r) low[r] = high[r] = V::broadcast(0.0f);
      const float* x = in + column;
      for (std::size_t k = 0; k < order; ++k, x += stride, factor += kRows) {
        const V a = V::load(x), b = V::load(x + second);
        for (int r = 0; r < kRows; ++r) {
          const V f = V::broadcast(factor[r]);
          low[r] = V::multiply_add(a, f, low[r]);
          high[r] = V::multiply_add(b, f, high[r]);
        }
      }
      const std::size_t left = order - row;
      for (std::size_t r = 0; r < kRows && r < left; ++r) {
        local.add(low[r]);
        local.add(high[r]);
        low[r].store(out + (row + r) * stride + column);
        high[r].store(out + (row + r) * stride + column + second);
      }
    }
  }
  peak = local;
}

// The eight sums a +- b +- c +- d of every four rows; those that begin with -a are their negatives.
template <class V, int Columns>
GRAPHROT_INLINE void sums_of_four(const float* in, std::size_t stride, std::size_t quads, float* table) {
  constexpr std::size_t kEntry = Columns * kSumFloats;
  for (std::size_t quad = 0; quad < quads; ++quad, in += 4 * stride, table += kSumsOfFour * kEntry) {
    for (std::size_t i = 0; i < kEntry; i += width<V>()) {
      const V a = V::load(in + i), b = V::load(in + stride + i);
      const V c = V::load(in + 2 * stride + i), d = V::load(in + 3 * stride + i);
      const V p = a + b, m = a - b, q = c + d, r = c - d;
      (p + q).store(table + i);
      (p + r).store(table + kEntry + i);
      (p - r).store(table + 2 * kEntry + i);
      (p - q).store(table + 3 * kEntry + i);
      (m + q).store(table + 4 * kEntry + i);
      (m + r).store(table + 5 * kEntry + i);
      (m - r).store(table + 6 * kEntry + i);
      (m - q).store(table + 7 * kEntry + i);
    }
  }
}

// One slab of the plan: every row of the result gets its terms of the table, on top of `partial` unless First.
template <class V, int Columns, bool First, bool Last, class T, class Peak>
GRAPHROT_INLINE const std::uint16_t* add_terms(const std::uint16_t* plan, std::size_t order, std::size_t quads,
                                      const float* table, float* partial, T* out, std::size_t stride, Peak& peak) {
  constexpr int kVectors = static_cast<int>(Columns * kSumFloats / width<V>());
  for (std::size_t row = 0; row < order; ++row, plan += 2 + quads) {
    const std::uint16_t* const terms = plan + 2;
    const std::size_t plus = plan[1];
    V sum[kVectors];
    std::size_t term = 0;
    if (!First) {
      for (int v = 0; v < kVectors; ++v) sum[v] = V::load(partial + plan[0] * Columns * kSumFloats + v * width<V>());
    } else if (plus == 0) {
      for (int v = 0; v < kVectors; ++v) sum[v] = V::broadcast(0.0f);
    } else {
      for (int v = 0; v < kVectors; ++v) sum[v] = V::load(table + terms[0] + v * width<V>());
      term = 1;
    }
    for (; term < plus; ++term) {
      for (int v = 0; v < kVectors; ++v) sum[v] = sum[v] + V::load(table + terms[term] + v * width<V>());
    }
    for (; term < quads; ++term) {
      for (int v = 0; v < kVectors; ++v) sum[v] = sum[v] - V::load(table + terms[term] + v * width<V>());
    }
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (Last) {
        peak.add(sum[v]);
        sum[v].store(out + plan[0] * stride + v * width<V>());
      } else {
        sum[v].store(partial + plan[0] * Columns * kSumFloats + v * width<V>());
      }
    }
  }
  return plan;
}

template <class V, int Columns, class T, class Peak>
inline void mix_columns(const HadamardProblem& problem, const float* in, T* out, std::size_t stride, float* scratch,
                        Peak& peak) {
  Peak local = peak;
  NoPeak none;
  const std::size_t order = problem.order;
  float* const partial = scratch + kSumsInSlab * kSumsOfFour * Columns * kSumFloats;
  for (std::size_t column = 0; column < stride; column += Columns * kSumFloats) {
    const std::uint16_t* plan = problem.sums;
    const float* from = in + column;
    std::size_t left = order / 4;
    for (bool first = true; left > 0; first = false) {
      const std::size_t quads = *plan++;
      sums_of_four<V, Columns>(from, stride, quads, scratch);
      from += 4 * quads * stride;
      left -= quads;
      if (first && left == 0) {
        plan = add_terms<V, Columns, true, true>(plan, order, quads, scratch, partial, out + column, stride, local);
      } else if (first) {
        plan = add_terms<V, Columns, true, false>(plan, order, quads, scratch, partial, out + column, stride, none);
      } else if (left > 0) {
        plan = add_terms<V, Columns, false, false>(plan, order, quads, scratch, partial, out + column, stride, none);
      } else {
        plan = add_terms<V, Columns, false, true>(plan, order, quads, scratch, partial, out + column, stride, local);
      }
    }
  }
  peak = local;
}

// A factor of +-1 whose order is a multiple of four, by the plan of sums.h. `out` may be `in`.
template <class V, class T, class Peak>
inline void mix_by_sums(const HadamardProblem& problem, const float* in, T* out, std::size_t stride, float* scratch,
                        Peak& peak) {
  switch (problem.columns) {
    case 4: return mix_columns<V, 4>(problem, in, out, stride, scratch, peak);
    case 2: return mix_columns<V, 2>(problem, in, out, stride, scratch, peak);
    default: return mix_columns<V, 1>(problem, in, out, stride, scratch, peak);
  }
}

}  // namespace graphrot::panel
