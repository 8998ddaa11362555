// The transform inside a kernel. A warp takes units of 2048 channels, 64 in each lane: eight vectors of eight channels,
// so that global memory is read and written 16 bytes a lane, lanes side by side. Levels of the Sylvester part:
//   channel bits 0 to 2 inside vectors, 8 to 10 between vectors;
//   3 to 7 between lanes: a shuffle swaps a bit of the lane's number with one of the vector's, half the registers each
//   time, and then the level is between registers. What the swaps leave behind is known (unit_place);
//   11 and above between warps, through shared memory: up to two levels for each pass.
// Then the factor, if there is one: tiles of four of its columns by eight channels, from shared memory.
// Whoever has final values hands eight neighbours at a time to a sink; one in place (kInPlace) also sees what a warp
// has left in shared memory.
#pragma once

#include "common/cuda/device.cuh"
#include "common/cuda/element.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/shared.cuh"
#include "hadamard/cuda.h"

namespace graphrot::cuda {

inline constexpr unsigned kVector = 8;                // neighbouring channels in a lane
inline constexpr unsigned kVectors = 8;               // of them in a lane
inline constexpr unsigned kHeld = kVector * kVectors;
inline constexpr unsigned kUnit = kWarp * kHeld;      // channels of a warp
inline constexpr unsigned kUnitLevels = 11;
inline constexpr unsigned kTile = 4;                  // columns of the factor in a tile

inline constexpr unsigned kMostThreads = 384;         // of a block: a thread has 168 registers, which is enough
inline constexpr std::size_t kMostOrder = kMostThreads * kTile;

// Threads of a block for so many pieces of work on so many floats in shared memory: with many blocks, small ones that
// share a multiprocessor, so that one computes while another waits for memory; not where few would fit. In place, each
// group of columns of the factor must have a thread.
inline constexpr std::size_t kManyBlocks = 256;
inline constexpr std::size_t kSmallFloats = std::size_t{1} << 14;
inline unsigned block_threads(std::size_t work, std::size_t blocks, std::size_t groups, std::size_t floats) {
  std::size_t most = blocks < kManyBlocks || floats > kSmallFloats ? kMostThreads : 128;
  if (most < groups) most = groups;
  const std::size_t threads = ((work < most ? work : most) + kWarp - 1) / kWarp * kWarp;
  return threads < 64 ? 64u : static_cast<unsigned>(threads);
}

// What a kernel is given of a transform.
struct Rotation {
  unsigned size, order, levels;
  float scale;
  const float* factor;
};

inline Rotation rotation_of(const CudaHadamard& problem) {
  return {static_cast<unsigned>(problem.size), static_cast<unsigned>(problem.order),
          static_cast<unsigned>(problem.levels), problem.scale, static_cast<const float*>(problem.factor)};
}

// Where channel i is in shared memory, in floats: 16-byte places of 128 bytes are exchanged so that neither lanes that
// are 256 channels apart nor lanes that are eight apart meet in a bank.
GRAPHROT_DEVICE unsigned swizzled(unsigned i) { return i ^ ((((i >> 8) ^ ((i >> 5) & 1u)) & 7u) << 2); }
inline constexpr unsigned kSwizzle = 32;  // floats that are exchanged among each other: arrays are multiples of it

GRAPHROT_HOST_DEVICE constexpr unsigned swizzled_floats(std::size_t channels) {
  return static_cast<unsigned>((channels + kSwizzle - 1) / kSwizzle * kSwizzle);
}

GRAPHROT_DEVICE void load_vector(Shared<float> data, unsigned at, float* x) {
  const float4 low = data.vector<float4>(swizzled(at)), high = data.vector<float4>(swizzled(at + 4));
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

GRAPHROT_DEVICE void store_vector(Shared<float> data, unsigned at, const float* x) {
  data.vector<float4>(swizzled(at)) = make_float4(x[0], x[1], x[2], x[3]);
  data.vector<float4>(swizzled(at + 4)) = make_float4(x[4], x[5], x[6], x[7]);
}

// Global memory, eight elements at a time where that is aligned and all of them exist. Their type is known at run time:
// it matters at both ends of the work alone, and a kernel for each type would be compiled three times.
GRAPHROT_DEVICE std::size_t bytes_before(Element element, std::size_t count) {
  return element == Element::kFloat ? count * 4 : count * 2;
}

struct GlobalIn {
  const unsigned char* from;
  Element element;
  bool aligned;

  GRAPHROT_DEVICE GlobalIn(const void* all, std::size_t first, Element type, bool all_aligned)
      : from(static_cast<const unsigned char*>(all) + bytes_before(type, first)), element(type), aligned(all_aligned) {}

  template <class T>
  GRAPHROT_DEVICE void load_as(unsigned at, unsigned end, float* x) const {
    constexpr unsigned kEach = kPack<T>;
    const T* const elements = reinterpret_cast<const T*>(from);
    if (aligned && at + kVector <= end) {
      GRAPHROT_UNROLL
      for (unsigned part = 0; part < kVector; part += kEach) {
        float some[kEach];
        unpack<T>(load16_in_place(elements + at + part), some);
        GRAPHROT_UNROLL
        for (unsigned e = 0; e < kEach; ++e) x[part + e] = some[e];
      }
      return;
    }
    GRAPHROT_UNROLL
    for (unsigned e = 0; e < kVector; ++e) x[e] = at + e < end ? widen(elements[at + e]) : 0.0f;
  }

  // `Count` vectors, `apart` elements from one to the next.
  template <unsigned Count>
  GRAPHROT_DEVICE void load(unsigned at, unsigned apart, unsigned end, float* x) const {
    if (element == Element::kHalf) return load_all<Half, Count>(at, apart, end, x);
    if (element == Element::kBFloat16) return load_all<BFloat16, Count>(at, apart, end, x);
    load_all<float, Count>(at, apart, end, x);
  }

 private:
  template <class T, unsigned Count>
  GRAPHROT_DEVICE void load_all(unsigned at, unsigned apart, unsigned end, float* x) const {
    GRAPHROT_UNROLL
    for (unsigned v = 0; v < Count; ++v) load_as<T>(at + v * apart, end, x + v * kVector);
  }
};

// A sink: final values to global memory.
struct GlobalOut {
  static constexpr bool kInPlace = false;  // shared memory is left alone
  unsigned char* to;
  unsigned end;
  Element element;
  bool aligned;

  GRAPHROT_DEVICE GlobalOut(void* all, std::size_t first, unsigned count, Element type, bool all_aligned)
      : to(static_cast<unsigned char*>(all) + bytes_before(type, first)), end(count), element(type),
        aligned(all_aligned) {}

  template <class T>
  GRAPHROT_DEVICE void take_as(unsigned at, unsigned count, const float* x) const {
    constexpr unsigned kEach = kPack<T>;
    T* const elements = reinterpret_cast<T*>(to);
    if (aligned && count == kVector && at + kVector <= end) {
      GRAPHROT_UNROLL
      for (unsigned part = 0; part < kVector; part += kEach) {
        float some[kEach];
        GRAPHROT_UNROLL
        for (unsigned e = 0; e < kEach; ++e) some[e] = x[part + e];
        store16(elements + at + part, pack<T>(some));
      }
      return;
    }
    GRAPHROT_UNROLL
    for (unsigned e = 0; e < kVector; ++e) {
      if (e < count && at + e < end) elements[at + e] = narrow<T>(x[e]);
    }
  }

  GRAPHROT_DEVICE void take(unsigned at, unsigned count, const float* x) const {
    if (element == Element::kHalf) return take_as<Half>(at, count, x);
    if (element == Element::kBFloat16) return take_as<BFloat16>(at, count, x);
    take_as<float>(at, count, x);
  }
};

// One level between registers whose numbers differ in the bit `Step`.
template <unsigned Step, unsigned Count>
GRAPHROT_DEVICE void level(float (&x)[Count]) {
  GRAPHROT_UNROLL
  for (unsigned i = 0; i < Count; ++i) {
    if ((i & Step) != 0) continue;
    const float low = x[i], high = x[i + Step];
    x[i] = low + high;
    x[i + Step] = low - high;
  }
}

// The lane's bit and the register's bit `Step` change places.
template <unsigned LaneBit, unsigned Step>
GRAPHROT_DEVICE void swap_bits(float (&x)[kHeld]) {
  const bool upper = (threadIdx.x & LaneBit) != 0;
  GRAPHROT_UNROLL
  for (unsigned i = 0; i < kHeld; ++i) {
    if ((i & Step) != 0) continue;
    const float got = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + Step], LaneBit);
    if (upper) {
      x[i] = got;
    } else {
      x[i + Step] = got;
    }
  }
}

// The lowest levels of a unit, up to kUnitLevels of them. Vector v of the lane was at channels 256 v + 8 lane, and is at
// unit_place(v) afterwards.
GRAPHROT_DEVICE void mix_unit(float (&x)[kHeld], unsigned levels) {
  if (levels > 0) level<1>(x);
  if (levels > 1) level<2>(x);
  if (levels > 2) level<4>(x);
  if (levels > 8) level<8>(x);
  if (levels > 9) level<16>(x);
  if (levels > 10) level<32>(x);
  swap_bits<1, 8>(x);
  if (levels > 3) level<8>(x);
  swap_bits<2, 16>(x);
  if (levels > 4) level<16>(x);
  swap_bits<4, 32>(x);
  if (levels > 5) level<32>(x);
  swap_bits<8, 8>(x);
  if (levels > 6) level<8>(x);
  swap_bits<16, 16>(x);
  if (levels > 7) level<16>(x);
}

GRAPHROT_DEVICE unsigned unit_place(unsigned vector) {
  const unsigned lane = threadIdx.x % kWarp;
  return (vector & 3u) << 6 | (vector & 4u) << 3 | (lane & 7u) << 8 | (lane >> 3) << 3;
}

GRAPHROT_DEVICE void load_unit(const GlobalIn& in, unsigned first, unsigned end, float scale, float (&x)[kHeld]) {
  in.load<kVectors>(first + threadIdx.x % kWarp * kVector, kWarp * kVector, end, x);
  GRAPHROT_UNROLL
  for (unsigned i = 0; i < kHeld; ++i) x[i] *= scale;
}

// A mixed unit to swizzled shared memory. Its places differ from each other by known numbers and by the bit 4.
GRAPHROT_DEVICE void store_unit(Shared<float> data, unsigned first, unsigned count, const float (&x)[kHeld]) {
  const unsigned at = first + unit_place(0), place = swizzled(at);
  GRAPHROT_UNROLL
  for (unsigned v = 0; v < kVectors; ++v) {
    const unsigned further = (v & 3u) << 6 | (v & 4u) << 3, low = v < 4 ? place : place ^ 4u;
    if (at + further >= count) continue;
    const float* const y = x + v * kVector;
    data.vector<float4>(low + further) = make_float4(y[0], y[1], y[2], y[3]);
    data.vector<float4>((low ^ 4u) + further) = make_float4(y[4], y[5], y[6], y[7]);
  }
}

// `Levels` levels between channels of shared memory, the lowest of them `low`, at least 3.
template <int Levels, bool Last, class Sink>
GRAPHROT_DEVICE void pass(Shared<float> data, unsigned count, unsigned low, const Sink& sink) {
  constexpr unsigned kCount = kVector << Levels;
  const unsigned stride = 1u << low, items = (count >> Levels) / kVector;
  GRAPHROT_NO_UNROLL
  for (unsigned item = threadIdx.x; item < items; item += blockDim.x) {
    const unsigned at = item * kVector, first = (at >> low) << (low + Levels) | (at & (stride - 1));
    float x[kCount];
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < kCount; i += kVector) load_vector(data, first + i / kVector * stride, x + i);
    level<8>(x);
    if constexpr (Levels > 1) level<16>(x);
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < kCount; i += kVector) {
      const unsigned to = first + i / kVector * stride;
      if constexpr (Last) {
        sink.take(to, kVector, x + i);
      } else {
        store_vector(data, to, x + i);
      }
    }
  }
}

// A tile of the factor: of `count` blocks, columns of the factor 4 g to 4 g + 3 by up to eight channels.
struct FactorTile {
  unsigned first, channels, column;  // the first channel, how many of them, the first column of the factor
};

GRAPHROT_DEVICE FactorTile factor_tile(const Rotation& rotation, unsigned group, unsigned along) {
  const unsigned width = 1u << rotation.levels;
  const unsigned across = (width + kVector - 1) / kVector;  // tiles along a row
  return {along / across * rotation.size + along % across * kVector, width < kVector ? width : kVector, group * kTile};
}

GRAPHROT_DEVICE void factor_sums(const Rotation& rotation, Shared<float> data, const FactorTile& tile,
                                 float (&sum)[kTile * kVector]) {
  constexpr unsigned kPad = kCudaFactorPad;
  const unsigned padded = (rotation.order + kPad - 1) / kPad * kPad;
  const float* factor = rotation.factor + tile.column;
  GRAPHROT_UNROLL
  for (unsigned i = 0; i < kTile * kVector; ++i) sum[i] = 0.0f;
  unsigned at = tile.first;
  GRAPHROT_NO_UNROLL
  for (unsigned k = 0; k < rotation.order; ++k, factor += padded, at += 1u << rotation.levels) {
    float x[kVector], f[kTile];
    if (tile.channels == kVector) {
      load_vector(data, at, x);
    } else {
      GRAPHROT_UNROLL
      for (unsigned e = 0; e < kVector; ++e) x[e] = e < tile.channels ? data[swizzled(at + e)] : 0.0f;
    }
    const float4 four = __ldg(reinterpret_cast<const float4*>(factor));
    f[0] = four.x, f[1] = four.y, f[2] = four.z, f[3] = four.w;
    GRAPHROT_UNROLL
    for (unsigned r = 0; r < kTile; ++r) {
      GRAPHROT_UNROLL
      for (unsigned e = 0; e < kVector; ++e) sum[r * kVector + e] = fmaf(f[r], x[e], sum[r * kVector + e]);
    }
  }
}

template <class Sink>
GRAPHROT_DEVICE void sink_tile(const Rotation& rotation, const FactorTile& tile, const float (&sum)[kTile * kVector],
                               const Sink& sink) {
  GRAPHROT_UNROLL
  for (unsigned r = 0; r < kTile; ++r) {
    if (tile.column + r < rotation.order) {
      sink.take(tile.first + ((tile.column + r) << rotation.levels), tile.channels, sum + r * kVector);
    }
  }
}

// The factor of every block in `count` channels of shared memory. A sink that writes to the same shared memory waits
// until all threads have read what it overwrites.
template <class Sink>
GRAPHROT_DEVICE void apply_factor(const Rotation& rotation, Shared<float> data, unsigned count, const Sink& sink) {
  const unsigned width = 1u << rotation.levels;
  const unsigned groups = (rotation.order + kTile - 1) / kTile;
  const unsigned along = count / rotation.size * ((width + kVector - 1) / kVector);
  float sum[kTile * kVector];
  if constexpr (!Sink::kInPlace) {
    for (unsigned t = threadIdx.x; t < groups * along; t += blockDim.x) {
      const FactorTile tile = factor_tile(rotation, t / along, t % along);
      factor_sums(rotation, data, tile, sum);
      sink_tile(rotation, tile, sum, sink);
    }
  } else {
    const unsigned strip = blockDim.x / groups;  // tiles side by side, with all columns of the factor
    for (unsigned first = 0; first < along; first += strip) {
      const unsigned group = threadIdx.x / strip, place = first + threadIdx.x % strip;
      const bool active = group < groups && place < along;
      const FactorTile tile = factor_tile(rotation, group, place);
      if (active) factor_sums(rotation, data, tile, sum);
      __syncthreads();
      if (active) sink_tile(rotation, tile, sum, sink);
    }
  }
}

// The transform of `count` channels, whole blocks, from global memory to the sink, by all threads of a block. `data`
// holds swizzled_floats(count) floats.
template <class Sink>
GRAPHROT_DEVICE void transform(const Rotation& rotation, const GlobalIn& in, unsigned count, float scale,
                               Shared<float> data, const Sink& sink) {
  const bool last = Sink::kInPlace && rotation.order == 1 && rotation.levels <= kUnitLevels;  // else a warp's own work
  GRAPHROT_NO_UNROLL
  for (unsigned first = threadIdx.x / kWarp * kUnit; first < count; first += blockDim.x / kWarp * kUnit) {
    float x[kHeld];
    load_unit(in, first, count, scale, x);
    mix_unit(x, rotation.levels);
    store_unit(data, first, count, x);
    if constexpr (Sink::kInPlace) {
      if (last) sink.see(x);
    }
  }
  if (last) return;
  __syncthreads();
  // The last two levels in one pass; what would be more is rare.
  unsigned low = kUnitLevels;
  for (; low + (rotation.order == 1 ? 2 : 0) < rotation.levels; ++low) {
    pass<1, false>(data, count, low, sink);
    __syncthreads();
  }
  if (rotation.order == 1) {
    if (rotation.levels - low == 1) return pass<1, true>(data, count, low, sink);
    return pass<2, true>(data, count, low, sink);
  }
  apply_factor(rotation, data, count, sink);
}

}  // namespace graphrot::cuda
