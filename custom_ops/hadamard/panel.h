// The transform written once over a vector type V of 2^V::kLevels floats. Each instruction set includes this
// file with a V of an unnamed namespace, so that nothing instantiated here is shared between object files.
// Registers are enough for 2^V::kChunk vectors and what goes with them.
//
// A panel is `group` blocks laid out as [K, group, 2^levels]: rows of P = group * 2^levels >= 16 contiguous
// floats. Both halves of the transform then run along contiguous memory, whatever the size:
//   1. Sylvester: butterflies inside every aligned 2^levels floats (the lowest V::kLevels + V::kChunk levels in
//      registers, then in passes of up to V::kChunk levels; cache blocks of 4096 floats first);
//   2. factor: row r of the result is the sum of rows k times F[k, r], in tiles of 4 rows by two vectors.
#pragma once

#include <cstddef>
#include <type_traits>

#include "hadamard/hadamard.h"

namespace graphrot::panel {

constexpr std::size_t kBlockLevels = 12;  // 16 KiB: stays in the first-level cache

template <class V>
constexpr std::size_t width() {
  return std::size_t{1} << V::kLevels;
}

#if defined(_MSC_VER)
#define GRAPHROT_INLINE __forceinline
#else
#define GRAPHROT_INLINE inline __attribute__((always_inline))
#endif

// The levels between `Count` vectors, unrolled by hand: compilers give up at sixteen, and v would go to memory.
template <int Step, int I, int Count, class V>
GRAPHROT_INLINE void between(V (&v)[Count]) {
  if constexpr (I < Count) {
    if constexpr ((I & Step) == 0) {
      const V low = v[I], high = v[I + Step];
      v[I] = low + high;
      v[I + Step] = low - high;
    }
    between<Step, I + 1>(v);
  } else if constexpr (2 * Step < Count) {
    between<2 * Step, 0>(v);
  }
}

// Levels in registers for 2^Vectors vectors: strides below the width inside each, the others between them.
template <class V, int Inside, int Vectors, class T>
inline void chunk(const T* in, float* out, V scale) {
  constexpr int kCount = 1 << Vectors;
  V v[kCount];
  for (int i = 0; i < kCount; ++i) {
    v[i] = V::load(in + i * width<V>()) * scale;
    if constexpr (Inside > 0) v[i] = v[i].template butterfly<1>();
    if constexpr (Inside > 1) v[i] = v[i].template butterfly<2>();
    if constexpr (Inside > 2) v[i] = v[i].template butterfly<4>();
    if constexpr (Inside > 3) v[i] = v[i].template butterfly<8>();
  }
  if constexpr (Vectors > 0) between<1, 0>(v);
  for (int i = 0; i < kCount; ++i) v[i].store(out + i * width<V>());
}

// `Levels` levels in one pass over `count` floats, the lowest of them at `stride`.
template <class V, int Levels>
inline void pass(float* data, std::size_t count, std::size_t stride) {
  constexpr int kCount = 1 << Levels;
  for (std::size_t base = 0; base < count; base += stride * kCount) {
    for (std::size_t j = base; j < base + stride; j += width<V>()) {
      V v[kCount];
      for (int i = 0; i < kCount; ++i) v[i] = V::load(data + j + static_cast<std::size_t>(i) * stride);
      between<1, 0>(v);
      for (int i = 0; i < kCount; ++i) v[i].store(data + j + static_cast<std::size_t>(i) * stride);
    }
  }
}

// Levels `from` to `to` (exclusive) over `count` floats, a multiple of 2^to.
template <class V>
inline void passes(float* data, std::size_t count, std::size_t from, std::size_t to) {
  while (from < to) {
    const std::size_t stride = std::size_t{1} << from, left = to - from;
    if constexpr (V::kChunk > 3) {
      if (left >= 4) {
        pass<V, 4>(data, count, stride);
        from += 4;
        continue;
      }
    }
    if (left >= 3) {
      pass<V, 3>(data, count, stride);
      from += 3;
    } else if (left == 2) {
      pass<V, 2>(data, count, stride);
      from += 2;
    } else {
      pass<V, 1>(data, count, stride);
      from += 1;
    }
  }
}

template <class V, int Inside, int Vectors, class T>
inline void chunks(const T* in, float* out, std::size_t count, V scale) {
  constexpr std::size_t kStep = width<V>() << Vectors;
  for (std::size_t i = 0; i < count; i += kStep) chunk<V, Inside, Vectors>(in + i, out + i, scale);
}

// All levels in registers: finds the `Levels` that is `levels`, below V::kLevels + V::kChunk.
template <class V, int Levels, class T>
inline void few_levels(const T* in, float* out, std::size_t count, std::size_t levels, V scale) {
  constexpr int kInside = Levels < V::kLevels ? Levels : V::kLevels;
  if (levels == Levels) return chunks<V, kInside, Levels - kInside>(in, out, count, scale);
  if constexpr (Levels + 1 < V::kLevels + V::kChunk) few_levels<V, Levels + 1>(in, out, count, levels, scale);
}

// out = scale * in, with the Sylvester transform of every aligned 2^levels floats. `count` is a multiple of
// 2^levels and of 16; `in` may be `out`.
template <class V, class T>
inline void sylvester(const T* in, float* out, std::size_t count, std::size_t levels, float scale_value) {
  constexpr std::size_t kInRegisters = V::kLevels + V::kChunk;
  const V scale = V::broadcast(scale_value);
  if (levels < kInRegisters) return few_levels<V, 0>(in, out, count, levels, scale);
  const std::size_t inner = levels < kBlockLevels ? levels : kBlockLevels;
  const std::size_t block = std::size_t{1} << inner;
  for (std::size_t start = 0; start < count; start += block) {
    chunks<V, V::kLevels, V::kChunk>(in + start, out + start, block, scale);
    passes<V>(out + start, block, kInRegisters, inner);
  }
  passes<V>(out, count, inner, levels);
}

// out[r, :] = sum over k of F[k, r] * in[k, :], rows of `stride` floats (a multiple of two vectors).
template <class V, class T>
inline void mix(const HadamardProblem& problem, const float* in, T* out, std::size_t stride) {
  constexpr int kRows = 4;
  const std::size_t order = problem.order;
  for (std::size_t column = 0; column < stride; column += 2 * width<V>()) {
    const float* factor = problem.factor;
    for (std::size_t row = 0; row < order; row += kRows) {
      V low[kRows], high[kRows];
      for (int r = 0; r < kRows; ++r) low[r] = high[r] = V::broadcast(0.0f);
      const float* x = in + column;
      for (std::size_t k = 0; k < order; ++k, x += stride, factor += kRows) {
        const V a = V::load(x), b = V::load(x + width<V>());
        for (int r = 0; r < kRows; ++r) {
          const V f = V::broadcast(factor[r]);
          low[r] = V::multiply_add(a, f, low[r]);
          high[r] = V::multiply_add(b, f, high[r]);
        }
      }
      const std::size_t left = order - row;
      for (std::size_t r = 0; r < kRows && r < left; ++r) {
        low[r].store(out + (row + r) * stride + column);
        high[r].store(out + (row + r) * stride + column + width<V>());
      }
    }
  }
}

// One block at a time: rows are long enough by themselves.
template <class V, class T>
inline void run_long(const HadamardProblem& problem, const T* in, T* out, std::size_t blocks, float* scratch) {
  const std::size_t size = problem.size;
  for (std::size_t block = 0; block < blocks; ++block, in += size, out += size) {
    if constexpr (std::is_same_v<T, float>) {
      if (problem.order == 1) {
        sylvester<V>(in, out, size, problem.levels, problem.scale);
        continue;
      }
    }
    sylvester<V>(in, scratch, size, problem.levels, problem.scale);
    if (problem.order > 1) {
      mix<V>(problem, scratch, out, std::size_t{1} << problem.levels);
    } else {
      for (std::size_t i = 0; i < size; i += width<V>()) V::load(scratch + i).store(out + i);
    }
  }
}

// Short rows: `group` blocks side by side. Missing blocks of the last panel are zeros and are not stored.
template <class V, class T>
inline void run_short(const HadamardProblem& problem, const T* in, T* out, std::size_t blocks, float* scratch) {
  const std::size_t size = problem.size, order = problem.order, run = std::size_t{1} << problem.levels;
  const std::size_t stride = run * problem.group, count = order * stride;
  float* mixed = order > 1 ? scratch + count : scratch;
  for (std::size_t block = 0; block < blocks; block += problem.group) {
    const std::size_t present = blocks - block < problem.group ? blocks - block : problem.group;
    if (present < problem.group) {
      for (std::size_t i = 0; i < count; ++i) scratch[i] = 0.0f;
    }
    for (std::size_t g = 0; g < present; ++g) {
      const T* from = in + (block + g) * size;
      float* to = scratch + g * run;
      for (std::size_t k = 0; k < order; ++k, to += stride) {
        for (std::size_t j = 0; j < run; ++j) to[j] = V::one(*from++);
      }
    }
    sylvester<V>(static_cast<const float*>(scratch), scratch, count, problem.levels, problem.scale);
    if (order > 1) mix<V>(problem, scratch, mixed, stride);
    for (std::size_t g = 0; g < present; ++g) {
      T* to = out + (block + g) * size;
      const float* from = mixed + g * run;
      for (std::size_t k = 0; k < order; ++k, from += stride) {
        for (std::size_t j = 0; j < run; ++j) V::put(from[j], to++);
      }
    }
  }
}

template <class V, class T>
void run(const HadamardProblem& problem, const void* in, void* out, std::size_t blocks, float* scratch) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(out);
  if (problem.group == 1) {
    run_long<V>(problem, from, to, blocks, scratch);
  } else {
    run_short<V>(problem, from, to, blocks, scratch);
  }
}

template <class V>
constexpr HadamardKernels kernels() {
  return {{&run<V, float>, &run<V, Half>, &run<V, BFloat16>}};
}

}  // namespace graphrot::panel
