// The transform written once over a vector type V of eight floats. Each instruction set includes this file
// with a V of an unnamed namespace, so that nothing instantiated here is shared between object files.
//
// A panel is `group` blocks laid out as [K, group, 2^levels]: rows of P = group * 2^levels >= 16 contiguous
// floats. Both halves of the transform then run along contiguous memory, whatever the size:
//   1. Sylvester: butterflies inside every aligned 2^levels floats (in registers for strides 1 to 32, then in
//      passes of up to three levels; cache blocks of 4096 floats first);
//   2. factor: row r of the result is the sum of rows k times F[k, r], in tiles of 4 rows by 16 columns.
#pragma once

#include <cstddef>
#include <type_traits>

#include "hadamard/hadamard.h"

namespace graphrot::panel {

constexpr std::size_t kWidth = 8;
constexpr std::size_t kChunkLevels = 6;   // levels done in registers: 8 vectors of 8
constexpr std::size_t kBlockLevels = 12;  // 16 KiB: stays in the first-level cache

// Levels in registers for 2^Vectors vectors: strides below 8 inside each, the others between them.
template <class V, int Inside, int Vectors, class T>
inline void chunk(const T* in, float* out, V scale) {
  constexpr int kCount = 1 << Vectors;
  V v[kCount];
  for (int i = 0; i < kCount; ++i) {
    v[i] = V::load(in + i * kWidth) * scale;
    if constexpr (Inside > 0) v[i] = v[i].template butterfly<1>();
    if constexpr (Inside > 1) v[i] = v[i].template butterfly<2>();
    if constexpr (Inside > 2) v[i] = v[i].template butterfly<4>();
  }
  for (int stride = 1; stride < kCount; stride *= 2) {
    for (int i = 0; i < kCount; ++i) {
      if ((i & stride) != 0) continue;
      const V low = v[i], high = v[i + stride];
      v[i] = low + high;
      v[i + stride] = low - high;
    }
  }
  for (int i = 0; i < kCount; ++i) v[i].store(out + i * kWidth);
}

// `Levels` levels in one pass over `count` floats, the lowest of them at `stride`.
template <class V, int Levels>
inline void pass(float* data, std::size_t count, std::size_t stride) {
  constexpr int kCount = 1 << Levels;
  for (std::size_t base = 0; base < count; base += stride * kCount) {
    for (std::size_t j = base; j < base + stride; j += kWidth) {
      V v[kCount];
      for (int i = 0; i < kCount; ++i) v[i] = V::load(data + j + static_cast<std::size_t>(i) * stride);
      for (int step = 1; step < kCount; step *= 2) {
        for (int i = 0; i < kCount; ++i) {
          if ((i & step) != 0) continue;
          const V low = v[i], high = v[i + step];
          v[i] = low + high;
          v[i + step] = low - high;
        }
      }
      for (int i = 0; i < kCount; ++i) v[i].store(data + j + static_cast<std::size_t>(i) * stride);
    }
  }
}

// Levels `from` to `to` (exclusive) over `count` floats, a multiple of 2^to.
template <class V>
inline void passes(float* data, std::size_t count, std::size_t from, std::size_t to) {
  while (from < to) {
    const std::size_t stride = std::size_t{1} << from;
    if (to - from >= 3) {
      pass<V, 3>(data, count, stride);
      from += 3;
    } else if (to - from == 2) {
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
  constexpr std::size_t kStep = kWidth << Vectors;
  for (std::size_t i = 0; i < count; i += kStep) chunk<V, Inside, Vectors>(in + i, out + i, scale);
}

// out = scale * in, with the Sylvester transform of every aligned 2^levels floats. `count` is a multiple of
// 2^levels and of 16; `in` may be `out`.
template <class V, class T>
inline void sylvester(const T* in, float* out, std::size_t count, std::size_t levels, float scale_value) {
  const V scale = V::broadcast(scale_value);
  switch (levels) {
    case 0: return chunks<V, 0, 0>(in, out, count, scale);
    case 1: return chunks<V, 1, 0>(in, out, count, scale);
    case 2: return chunks<V, 2, 0>(in, out, count, scale);
    case 3: return chunks<V, 3, 0>(in, out, count, scale);
    case 4: return chunks<V, 3, 1>(in, out, count, scale);
    case 5: return chunks<V, 3, 2>(in, out, count, scale);
    default: break;
  }
  const std::size_t inner = levels < kBlockLevels ? levels : kBlockLevels;
  const std::size_t block = std::size_t{1} << inner;
  for (std::size_t start = 0; start < count; start += block) {
    chunks<V, 3, 3>(in + start, out + start, block, scale);
    passes<V>(out + start, block, kChunkLevels, inner);
  }
  passes<V>(out, count, inner, levels);
}

// out[r, :] = sum over k of F[k, r] * in[k, :], rows of `width` floats (a multiple of 16).
template <class V, class T>
inline void mix(const HadamardProblem& problem, const float* in, T* out, std::size_t width) {
  constexpr int kRows = 4;
  const std::size_t order = problem.order;
  for (std::size_t column = 0; column < width; column += 2 * kWidth) {
    const float* factor = problem.factor;
    for (std::size_t row = 0; row < order; row += kRows) {
      V low[kRows], high[kRows];
      for (int r = 0; r < kRows; ++r) low[r] = high[r] = V::broadcast(0.0f);
      const float* x = in + column;
      for (std::size_t k = 0; k < order; ++k, x += width, factor += kRows) {
        const V a = V::load(x), b = V::load(x + kWidth);
        for (int r = 0; r < kRows; ++r) {
          const V f = V::broadcast(factor[r]);
          low[r] = V::multiply_add(a, f, low[r]);
          high[r] = V::multiply_add(b, f, high[r]);
        }
      }
      const std::size_t left = order - row;
      for (std::size_t r = 0; r < kRows && r < left; ++r) {
        low[r].store(out + (row + r) * width + column);
        high[r].store(out + (row + r) * width + column + kWidth);
      }
    }
  }
}

// One block at a time: rows are long enough by themselves.
template <class V, class T>
inline void run_long(const HadamardProblem& problem, const T* in, T* out, std::size_t blocks, float* scratch) {
  const std::size_t size = problem.size, width = std::size_t{1} << problem.levels;
  for (std::size_t block = 0; block < blocks; ++block, in += size, out += size) {
    if constexpr (std::is_same_v<T, float>) {
      if (problem.order == 1) {
        sylvester<V>(in, out, size, problem.levels, problem.scale);
        continue;
      }
    }
    sylvester<V>(in, scratch, size, problem.levels, problem.scale);
    if (problem.order > 1) {
      mix<V>(problem, scratch, out, width);
    } else {
      for (std::size_t i = 0; i < size; i += kWidth) V::load(scratch + i).store(out + i);
    }
  }
}

// Short rows: `group` blocks side by side. Missing blocks of the last panel are zeros and are not stored.
template <class V, class T>
inline void run_short(const HadamardProblem& problem, const T* in, T* out, std::size_t blocks, float* scratch) {
  const std::size_t size = problem.size, order = problem.order, run = std::size_t{1} << problem.levels;
  const std::size_t width = run * problem.group, count = order * width;
  float* mixed = order > 1 ? scratch + count : scratch;
  for (std::size_t block = 0; block < blocks; block += problem.group) {
    const std::size_t present = blocks - block < problem.group ? blocks - block : problem.group;
    if (present < problem.group) {
      for (std::size_t i = 0; i < count; ++i) scratch[i] = 0.0f;
    }
    for (std::size_t g = 0; g < present; ++g) {
      const T* from = in + (block + g) * size;
      float* to = scratch + g * run;
      for (std::size_t k = 0; k < order; ++k, to += width) {
        for (std::size_t j = 0; j < run; ++j) to[j] = V::one(*from++);
      }
    }
    sylvester<V>(static_cast<const float*>(scratch), scratch, count, problem.levels, problem.scale);
    if (order > 1) mix<V>(problem, scratch, mixed, width);
    for (std::size_t g = 0; g < present; ++g) {
      T* to = out + (block + g) * size;
      const float* from = mixed + g * run;
      for (std::size_t k = 0; k < order; ++k, from += width) {
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
