// The transform written once over a vector type V of 2^V::kLevels floats. Each instruction set includes this
// file with a V of an unnamed namespace, so that nothing instantiated here is shared between object files.
// Registers are enough for 2^V::kChunk vectors and what goes with them.
//
// A panel is `group` blocks laid out as [K, group, 2^levels]: rows of P = group * 2^levels >= 16 contiguous
// floats. Both halves of the transform then run along contiguous memory, whatever the size:
//   1. Sylvester: butterflies inside every aligned 2^levels floats (the lowest V::kLevels + V::kChunk levels in
//      registers, then in passes of up to V::kChunk levels; cache blocks of 4096 floats first);
//   2. factor: row r of the result is the sum of rows k times F[k, r] (mix.h).
#pragma once

#include <cstddef>
#include <type_traits>

#include "hadamard/hadamard.h"
#include "hadamard/mix.h"

namespace graphrot::panel {

constexpr std::size_t kBlockLevels = 12;  // 16 KiB: stays in the first-level cache

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

// Where the input is not scaled.
struct Unscaled {};

template <class V>
inline V scaled(V v, V scale) {
  return v * scale;
}

template <class V>
inline V scaled(V v, Unscaled) {
  return v;
}

// Levels in registers for 2^Vectors vectors: strides below the width inside each, the others between them.
template <class V, int Inside, int Vectors, class T, class Scale, class Peak>
GRAPHROT_INLINE void chunk(const T* in, float* out, Scale scale, Peak& peak) {
  constexpr int kCount = 1 << Vectors;
  V v[kCount];
  for (int i = 0; i < kCount; ++i) {
    v[i] = scaled(V::load(in + i * width<V>()), scale);
    if constexpr (Inside > 0) v[i] = v[i].template butterfly<1>();
    if constexpr (Inside > 1) v[i] = v[i].template butterfly<2>();
    if constexpr (Inside > 2) v[i] = v[i].template butterfly<4>();
    if constexpr (Inside > 3) v[i] = v[i].template butterfly<8>();
  }
  if constexpr (Vectors > 0) between<1, 0>(v);
  for (int i = 0; i < kCount; ++i) {
    peak.add(v[i]);
    v[i].store(out + i * width<V>());
  }
}

template <class V, int Inside, int Vectors, class T, class Scale, class Peak>
inline void chunks(const T* in, float* out, std::size_t count, Scale scale, Peak& peak) {
  constexpr std::size_t kStep = width<V>() << Vectors;
  Peak local = peak;  // stays in a register
  for (std::size_t i = 0; i < count; i += kStep) chunk<V, Inside, Vectors>(in + i, out + i, scale, local);
  peak = local;
}

// `Levels` levels in one pass over `count` floats, the lowest of them at `stride`.
template <class V, int Levels, class Peak>
inline void pass(float* data, std::size_t count, std::size_t stride, Peak& peak) {
  constexpr int kCount = 1 << Levels;
  Peak local = peak;
  for (std::size_t base = 0; base < count; base += stride * kCount) {
    for (std::size_t j = base; j < base + stride; j += width<V>()) {
      V v[kCount];
      for (int i = 0; i < kCount; ++i) v[i] = V::load(data + j + static_cast<std::size_t>(i) * stride);
      between<1, 0>(v);
      for (int i = 0; i < kCount; ++i) {
        local.add(v[i]);
        v[i].store(data + j + static_cast<std::size_t>(i) * stride);
      }
    }
  }
  peak = local;
}

template <class V, class Peak>
inline void any_pass(float* data, std::size_t count, std::size_t stride, std::size_t levels, Peak& peak) {
  if constexpr (V::kChunk > 3) {
    if (levels == 4) return pass<V, 4>(data, count, stride, peak);
  }
  if (levels == 3) return pass<V, 3>(data, count, stride, peak);
  if (levels == 2) return pass<V, 2>(data, count, stride, peak);
  return pass<V, 1>(data, count, stride, peak);
}

// Levels `from` to `to` (exclusive) over `count` floats, a multiple of 2^to. The peak is that of the last pass.
template <class V, class Peak>
inline void passes(float* data, std::size_t count, std::size_t from, std::size_t to, Peak& peak) {
  constexpr std::size_t kMost = V::kChunk;
  NoPeak none;
  while (to - from > kMost) {
    any_pass<V>(data, count, std::size_t{1} << from, kMost, none);
    from += kMost;
  }
  any_pass<V>(data, count, std::size_t{1} << from, to - from, peak);
}

// All levels in registers: finds the `Levels` that is `levels`, at most V::kLevels + V::kChunk.
template <class V, int Levels, class T, class Scale, class Peak>
inline void few_levels(const T* in, float* out, std::size_t count, std::size_t levels, Scale scale, Peak& peak) {
  constexpr int kInside = Levels < V::kLevels ? Levels : V::kLevels;
  if (levels == Levels) return chunks<V, kInside, Levels - kInside>(in, out, count, scale, peak);
  if constexpr (Levels < V::kLevels + V::kChunk) {
    few_levels<V, Levels + 1>(in, out, count, levels, scale, peak);
  }
}

// out = scale * in, with the Sylvester transform of every aligned 2^levels floats. `count` is a multiple of
// 2^levels and of 16; `in` may be `out`.
template <class V, class T, class Scale, class Peak>
inline void sylvester(const T* in, float* out, std::size_t count, std::size_t levels, Scale scale, Peak& peak) {
  constexpr std::size_t kInRegisters = V::kLevels + V::kChunk;
  if (levels <= kInRegisters) return few_levels<V, 0>(in, out, count, levels, scale, peak);
  NoPeak none;
  const std::size_t inner = levels < kBlockLevels ? levels : kBlockLevels;
  const std::size_t block = std::size_t{1} << inner;
  for (std::size_t start = 0; start < count; start += block) {
    chunks<V, V::kLevels, V::kChunk>(in + start, out + start, block, scale, none);
    if (inner < levels) {
      passes<V>(out + start, block, kInRegisters, inner, none);
    } else {
      passes<V>(out + start, block, kInRegisters, inner, peak);
    }
  }
  if (inner < levels) passes<V>(out, count, inner, levels, peak);
}

// One block: rows are long enough by themselves. `out` may be `in` where both are of float.
template <class V, class T, class U, class Scale, class Peak>
inline void block_long(const HadamardProblem& problem, const T* in, U* out, Scale scale, float* scratch, Peak& peak) {
  const std::size_t size = problem.size, stride = std::size_t{1} << problem.levels;
  NoPeak none;
  if (problem.order == 1) {
    if constexpr (std::is_same_v<U, float>) {
      sylvester<V>(in, out, size, problem.levels, scale, peak);
    } else {
      sylvester<V>(in, scratch, size, problem.levels, scale, none);
      for (std::size_t i = 0; i < size; i += width<V>()) V::load(scratch + i).store(out + i);
    }
  } else if (problem.sums == nullptr) {
    sylvester<V>(in, scratch, size, problem.levels, scale, none);
    mix<V>(problem, scratch, out, stride, peak);
  } else if constexpr (std::is_same_v<U, float>) {
    sylvester<V>(in, out, size, problem.levels, scale, none);
    mix_by_sums<V>(problem, out, out, stride, scratch, peak);
  } else {
    sylvester<V>(in, scratch, size, problem.levels, scale, none);
    mix_by_sums<V>(problem, scratch, out, stride, scratch + size, peak);
  }
}

// Short rows: up to `group` blocks side by side. Missing blocks of the panel are zeros and are not stored.
template <class V, class T, class U, class Scale>
inline void blocks_short(const HadamardProblem& problem, const T* in, U* out, std::size_t present, Scale scale,
                         float* scratch) {
  const std::size_t order = problem.order, run = std::size_t{1} << problem.levels, size = problem.size;
  const std::size_t stride = run * problem.group, count = order * stride;
  float* const after = scratch + count;
  if (present < problem.group) {
    for (std::size_t i = 0; i < count; ++i) scratch[i] = 0.0f;
  }
  for (std::size_t g = 0; g < present; ++g) {
    const T* from = in + g * size;
    float* to = scratch + g * run;
    for (std::size_t k = 0; k < order; ++k, to += stride) {
      for (std::size_t j = 0; j < run; ++j) to[j] = V::one(*from++);
    }
  }
  NoPeak none;
  sylvester<V>(static_cast<const float*>(scratch), scratch, count, problem.levels, scale, none);
  const float* mixed = scratch;
  if (order > 1 && problem.sums != nullptr) {
    mix_by_sums<V>(problem, scratch, scratch, stride, after, none);
  } else if (order > 1) {
    mix<V>(problem, scratch, after, stride, none);
    mixed = after;
  }
  for (std::size_t g = 0; g < present; ++g) {
    U* to = out + g * size;
    const float* from = mixed + g * run;
    for (std::size_t k = 0; k < order; ++k, from += stride) {
      for (std::size_t j = 0; j < run; ++j) V::put(from[j], to++);
    }
  }
}

template <class V, class T>
inline void run_long(const HadamardProblem& problem, const T* in, T* out, std::size_t blocks, float* scratch) {
  const std::size_t size = problem.size;
  NoPeak none;
  for (std::size_t block = 0; block < blocks; ++block, in += size, out += size) {
    block_long<V>(problem, in, out, V::broadcast(problem.scale), scratch, none);
  }
}

template <class V, class T>
void run(const HadamardProblem& problem, const void* in, void* out, std::size_t blocks, float* scratch) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(out);
  if (problem.group == 1) return run_long<V>(problem, from, to, blocks, scratch);
  const std::size_t step = problem.group * problem.size;
  for (; blocks > 0; from += step, to += step) {
    const std::size_t present = blocks < problem.group ? blocks : problem.group;
    blocks_short<V>(problem, from, to, present, V::broadcast(problem.scale), scratch);
    blocks -= present;
  }
}

template <class V>
constexpr HadamardKernels kernels() {
  return {{&run<V, float>, &run<V, Half>, &run<V, BFloat16>}};
}

}  // namespace graphrot::panel
