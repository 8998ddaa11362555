// Rows to integers, written once over a policy Q of one instruction set: Q::Vector as hadamard/panel.h wants it, and
// Q::Codes for 64 codes at a time. Q is of an unnamed namespace, for the reason given there.
//
// The transform leaves out its scale, which the row's scale takes instead: a multiplication less for every element.
// Sums of unscaled elements can be beyond the largest float where scaled ones are not. Such a row, whose largest
// magnitude comes out as infinite or NaN, is done again with the scale first; what is not finite then is not by
// definition.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hadamard/panel.h"
#include "matmul/rows.h"

namespace graphrot::rows {

constexpr std::size_t kChunk = kRowAlignment;  // codes that are made together
constexpr std::size_t kHalf = kChunk / 2;
constexpr std::uint32_t kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;

// The bits of the largest magnitude.
template <class V, class T>
std::uint32_t largest(const T* z, std::size_t count) {
  constexpr std::size_t kWidth = panel::width<V>();
  typename V::Peak peak;
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) peak.add(V::load(z + i));
  if (i < count) {
    T last[kWidth] = {};
    for (std::size_t j = i; j < count; ++j) last[j - i] = z[j];
    peak.add(V::load(static_cast<const T*>(last)));
  }
  return peak.largest();
}

// z = scale * transform(x) without the problem's own scale. Returns the bits of the largest magnitude.
template <class V, class T, class Scale>
std::uint32_t transform(const HadamardProblem& problem, const T* x, float* z, std::size_t blocks, Scale scale,
                        float* scratch) {
  if constexpr (V::kSingles) {
    if (problem.group > 1) {
      const std::size_t count = blocks * problem.size, step = problem.group * problem.size;
      for (float* to = z; blocks > 0; x += step, to += step) {
        const std::size_t present = blocks < problem.group ? blocks : problem.group;
        panel::blocks_short<V>(problem, x, to, present, scale, scratch);
        blocks -= present;
      }
      return largest<V>(static_cast<const float*>(z), count);
    }
  }
  typename V::Peak peak;
  for (; blocks > 0; --blocks, x += problem.size, z += problem.size) {
    panel::block_long<V>(problem, x, z, scale, scratch, peak);
  }
  return peak.largest();
}

// Codes of one row and their sums. `z` may be read to a multiple of 64 only where Padded.
template <class Q, bool Padded, class T>
void quantize(const RowsProblem& problem, const T* z, float inverse, std::int8_t* codes, std::int32_t* sums) {
  using Codes = typename Q::Codes;
  const typename Q::Vector factor = Q::Vector::broadcast(inverse);
  const std::size_t channels = problem.channels, group = problem.group;
  const auto chunk = [&](std::size_t i) {
    if constexpr (!Padded) {
      if (channels - i < kChunk) {
        T last[kChunk] = {};
        for (std::size_t j = i; j < channels; ++j) last[j - i] = z[j];
        return Codes::make(static_cast<const T*>(last), factor, codes + i);
      }
    }
    return Codes::make(z + i, factor, codes + i);
  };
  if (group % kChunk == 0 || group >= channels) {
    for (std::size_t i = 0; i < channels; ++sums) {
      const std::size_t end = channels - i < group ? channels : i + group;
      Codes sum = chunk(i);
      for (i += kChunk; i < end; i += kChunk) sum.add(chunk(i));
      *sums = sum.total();
    }
  } else if (group == kHalf) {
    for (std::size_t i = 0; i < channels; i += kChunk) {
      const Codes sum = chunk(i);
      *sums++ = sum.low();
      if (i + kHalf < channels) *sums++ = sum.high();
    }
  } else {
    for (std::size_t i = 0; i < channels; i += kChunk) chunk(i);
    for (std::size_t i = 0; i < channels; ++sums) {
      std::int32_t sum = 0;
      for (const std::size_t end = channels - i < group ? channels : i + group; i < end; ++i) sum += codes[i];
      *sums = sum;
    }
  }
}

struct Scales {
  float scale, inverse;
};

// The row's scale, and what its elements are multiplied by to become codes, where all of them lack the factor `missing`
// and the largest magnitude is `largest` without it.
template <class Q>
Scales scales_of(float largest, float missing, float levels) {
  const float magnitude = missing < 0 ? -largest * missing : largest * missing;
  if (magnitude > kRowEpsilon) return {magnitude / levels, (missing < 0 ? -levels : levels) / largest};
  return {kRowEpsilon / levels, missing * levels / kRowEpsilon};
}

template <class Q, class T>
void run(const RowsProblem& problem, const void* in, std::size_t rows, const QuantizedRows& out, float* scratch) {
  using V = typename Q::Vector;
  const HadamardProblem* const rotation = problem.rotation;
  const T* x = static_cast<const T*>(in);
  const std::size_t channels = problem.channels, padded = (channels + kChunk - 1) / kChunk * kChunk;
  const std::size_t groups = (channels + problem.group - 1) / problem.group;
  const std::size_t blocks = rotation == nullptr ? 0 : channels / rotation->size;
  const auto levels = static_cast<float>(problem.levels);
  float* const work = scratch + padded;
  for (std::size_t i = channels; i < padded; ++i) scratch[i] = 0.0f;
  for (std::size_t row = 0; row < rows; ++row, x += channels) {
    std::int8_t* const codes = out.codes + row * out.stride;
    std::int32_t* const sums = out.sums + row * groups;
    float missing = 1.0f;
    std::uint32_t bits;
    if (rotation == nullptr) {
      bits = largest<V>(x, channels);
    } else {
      missing = rotation->scale;
      bits = kInfinityBits;
      if (missing <= 1.0f) bits = transform<V>(*rotation, x, scratch, blocks, panel::Unscaled{}, work);
      if (bits >= kInfinityBits) {
        bits = transform<V>(*rotation, x, scratch, blocks, V::broadcast(missing), work);
        missing = 1.0f;
      }
    }
    const Scales scales = scales_of<Q>(Q::float_of(bits), missing, levels);
    if (bits >= kInfinityBits || Q::bits_of(scales.scale) >= kInfinityBits) {
      out.scales[row] = Q::float_of(kNanBits);
      for (std::size_t i = 0; i < padded; ++i) codes[i] = 0;
      for (std::size_t g = 0; g < groups; ++g) sums[g] = 0;
      continue;
    }
    out.scales[row] = scales.scale;
    if (rotation == nullptr) {
      quantize<Q, false>(problem, x, scales.inverse, codes, sums);
    } else {
      quantize<Q, true>(problem, static_cast<const float*>(scratch), scales.inverse, codes, sums);
    }
  }
}

template <class Q>
constexpr RowsKernels kernels() {
  return {{&run<Q, float>, &run<Q, Half>, &run<Q, BFloat16>}};
}

}  // namespace graphrot::rows
