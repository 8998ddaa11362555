// What comes before attending: what is kept of the past, then new rows of the cache and the queries' numbers, both of
// rotated floats that were never rounded to the element type. A warp has one vector of up to 256 channels, or two of
// 128 or four of 64: eight channels a lane, read in 16 bytes.
#include "attention/attend_cuda.cuh"
#include "attention/store_cuda.h"
#include "common/cuda/launch.h"

namespace graphrot::cuda {
namespace {

constexpr unsigned kStoreWarps = 4, kStoreThreads = kStoreWarps * kWarp;
constexpr unsigned kLaneChannels = 8;
constexpr unsigned kCarryThreads = 256, kCarryPieces = 4;

constexpr float kLeastUnit = 1.17549435e-38f;  // the least normal number
constexpr unsigned kNan = 0x7e00u, kLargest = 0x7bffu, kSign = 0x8000u, kInfinity = 0x7c00u;

// ---- the past

// One head of the cache in 16-byte pieces that lie on 16-byte addresses of the present; the past may lie otherwise.
GRAPHROT_KERNEL(kCarryThreads) carry_kernel(const unsigned* past, unsigned* present, std::size_t kept,
                                            std::size_t words, unsigned blocks) {
  const std::size_t head = blockIdx.x / blocks;
  const unsigned* const from = past + head * kept;
  unsigned* const to = present + head * words;
  const auto skip = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) / 4 % 4);
  const auto all = static_cast<std::int64_t>(words), old = static_cast<std::int64_t>(kept);
  std::int64_t piece = static_cast<std::int64_t>(blockIdx.x % blocks) * kCarryPieces * kCarryThreads + threadIdx.x;
  GRAPHROT_UNROLL
  for (unsigned k = 0; k < kCarryPieces; ++k, piece += kCarryThreads) {
    const std::int64_t word = 4 * piece - skip;
    if (word >= all) return;
    uint4 v = make_uint4(0u, 0u, 0u, 0u);
    if (word >= 0 && word + 4 <= old) {
      if ((reinterpret_cast<std::uintptr_t>(from + word) & 15u) == 0) {
        v = load16(from + word);
      } else {
        v = make_uint4(from[word], from[word + 1], from[word + 2], from[word + 3]);
      }
    } else {
      const auto each = [&](std::int64_t at) { return at >= 0 && at < old ? from[at] : 0u; };
      v = make_uint4(each(word), each(word + 1), each(word + 2), each(word + 3));
    }
    if (word >= 0 && word + 4 <= all) {
      store16(to + word, v);
    } else {
      const unsigned four[4] = {v.x, v.y, v.z, v.w};
      for (std::int64_t i = 0; i < 4; ++i) {
        if (word + i >= 0 && word + i < all) to[word + i] = four[i];
      }
    }
  }
}

// ---- vectors

// The lanes of one vector.
struct Lanes {
  unsigned width;  // lanes
  unsigned own;    // this one
  bool used;       // it has channels of the vector
};

GRAPHROT_DEVICE float least_of(float x, const Lanes& lanes) {
  for (unsigned m = 1; m < lanes.width; m *= 2) x = fminf(x, __shfl_xor_sync(kAllLanes, x, static_cast<int>(m)));
  return x;
}
GRAPHROT_DEVICE float largest_of(float x, const Lanes& lanes) {
  for (unsigned m = 1; m < lanes.width; m *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, static_cast<int>(m)));
  return x;
}
GRAPHROT_DEVICE int sum_of(int x, const Lanes& lanes) {
  for (unsigned m = 1; m < lanes.width; m *= 2) x += __shfl_xor_sync(kAllLanes, x, static_cast<int>(m));
  return x;
}

template <class T>
GRAPHROT_DEVICE void load_channels(const T* from, float (&x)[kLaneChannels]) {
  if constexpr (sizeof(T) == 2) {
    unpack<T>(load16(from), x);
  } else {
    float low[4], high[4];
    unpack<T>(load16(from), low);
    unpack<T>(load16(from + 4), high);
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < 4; ++k) x[k] = low[k], x[k + 4] = high[k];
  }
}

// Sylvester's part over runs of 2^levels channels: in registers, then between lanes.
GRAPHROT_DEVICE void transform(unsigned levels, float (&x)[kLaneChannels]) {
  GRAPHROT_UNROLL
  for (unsigned level = 0; level < 3; ++level) {
    if (level >= levels) break;
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < kLaneChannels; ++k) {
      if ((k & 1u << level) != 0) continue;
      const float a = x[k], b = x[k | 1u << level];
      x[k] = a + b;
      x[k | 1u << level] = a - b;
    }
  }
  for (unsigned level = 3; level < levels; ++level) {
    const unsigned lanes = 1u << (level - 3);
    const float sign = (threadIdx.x & lanes) != 0 ? -1.0f : 1.0f;
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < kLaneChannels; ++k) {
      x[k] = fmaf(sign, x[k], __shfl_xor_sync(kAllLanes, x[k], static_cast<int>(lanes)));
    }
  }
}

// The factor's part, over the vector in shared memory. The factor's rows are padded to a multiple of eight.
GRAPHROT_DEVICE void mix(const CudaHadamard& rotation, Shared<float> z, unsigned own, float (&x)[kLaneChannels]) {
  const auto size = static_cast<unsigned>(rotation.size), order = static_cast<unsigned>(rotation.order);
  const unsigned width = size / order, stride = (order + 7) / 8 * 8;
  const auto* const factor = static_cast<const float*>(rotation.factor);
  GRAPHROT_UNROLL
  for (unsigned k = 0; k < kLaneChannels; ++k) {
    const unsigned channel = own * kLaneChannels + k, block = channel / size * size, row = channel % size / width;
    float sum = 0.0f;
    for (unsigned r = 0; r < order; ++r) {
      sum = fmaf(__ldg(factor + r * stride + row), z[block + r * width + channel % width], sum);
    }
    x[k] = sum;
  }
}

GRAPHROT_DEVICE void four_of(Shared<float> z, unsigned first, float (&x)[4]) {
  const float4 v = z.vector<float4>(first);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

GRAPHROT_DEVICE unsigned saturated(float value) {
  const unsigned bits = narrow<Half>(value).bits;
  return (bits & ~kSign) == kInfinity ? (bits & kSign) | kLargest : bits;
}

GRAPHROT_DEVICE unsigned code_of(float z, float base, float step, float levels) {
  const float quotient = __fdiv_rn(z - base, step);
  const float clipped = quotient > 0.0f ? (quotient < levels ? quotient : levels) : 0.0f;
  return static_cast<unsigned>(__float2int_rn(clipped));
}

// A row of the cache, to the bit as the CPU's.
template <int Bits>
GRAPHROT_DEVICE void store_row(const AttendShape& shape, const Lanes& lanes, const float (&x)[kLaneChannels],
                               Shared<float> z, unsigned* row, bool there) {
  float low = __uint_as_float(0x7f800000u), high = -low;
  int wrong = 0;
  if (lanes.used) {
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < kLaneChannels; ++k) {
      low = fminf(low, x[k]);
      high = fmaxf(high, x[k]);
      wrong |= (__float_as_uint(x[k]) & 0x7f800000u) == 0x7f800000u ? 1 : 0;
    }
  }
  low = least_of(low, lanes) + 0.0f;  // no negative zeros
  high = largest_of(high, lanes);
  const bool finite = sum_of(wrong, lanes) == 0;
  constexpr float kTop = Bits == 4 ? 15.0f : 255.0f;
  const unsigned step_bits = finite ? saturated(__fdiv_rn(high - low + 0.0f, kTop)) : 0u;
  const unsigned base_bits = finite ? saturated(low) : kNan;
  const float step = widen_low(step_bits, Half{}), base = widen_low(base_bits, Half{});
  if (!there) return;
  for (unsigned word = lanes.own; word < shape.code_words; word += lanes.width) {
    unsigned codes = 0;
    if (step_bits != 0) {
      float low_four[4], high_four[4];
      four_of(z, 4 * word, low_four);
      if (Bits == 4) four_of(z, 4 * word + shape.head_size / 2, high_four);
      GRAPHROT_UNROLL
      for (unsigned k = 0; k < 4; ++k) {
        unsigned byte = code_of(low_four[k], base, step, kTop);
        if (Bits == 4) byte |= code_of(high_four[k], base, step, kTop) << 4;
        codes |= byte << 8 * k;
      }
    }
    row[word] = codes;
  }
  if (lanes.own == 0) row[shape.code_words] = step_bits | base_bits << 16;
}

// A query as whole numbers, in the fragments of panel_cuda.cuh: this lane has words 4 j + i, of two times four
// channels.
template <int Bits>
GRAPHROT_DEVICE void store_query(const StoreShape& store, const Lanes& lanes, const float (&x)[kLaneChannels],
                                 Shared<float> z, unsigned vector) {
  const AttendShape& shape = store.attend;
  float most = 0.0f;
  int wrong = 0;
  if (lanes.used) {
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < kLaneChannels; ++k) {
      most = fmaxf(most, fabsf(x[k]));
      wrong |= (__float_as_uint(x[k]) & 0x7f800000u) == 0x7f800000u ? 1 : 0;
    }
  }
  most = largest_of(most, lanes);
  const bool finite = sum_of(wrong, lanes) == 0;
  const float inverse = finite && most > 0.0f ? store.sign * (kLevels / most) : 0.0f;
  const unsigned j = lanes.own / 4, i = lanes.own % 4;
  unsigned words[4] = {};  // high and low bytes of the first four channels, then of the others
  int sum = 0;
  GRAPHROT_UNROLL
  for (unsigned half = 0; half < 2; ++half) {
    const unsigned own = Bits == 4 ? 4 * lanes.own : 32 * j + 4 * i + 16 * half;
    const bool used = own < (Bits == 4 ? shape.head_size / 2 : shape.head_size);
    const unsigned channel = Bits == 4 ? own + half * (shape.head_size / 2) : own;
    if (!used || inverse == 0.0f) continue;
    float four[4];
    four_of(z, channel, four);
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < 4; ++k) {
      const int whole = __float2int_rn(four[k] * inverse), high = (whole + 128) >> 8;
      words[2 * half] |= (static_cast<unsigned>(high) & 0xffu) << 8 * k;
      words[2 * half + 1] |= (static_cast<unsigned>(whole) & 0xffu) << 8 * k;
      sum += whole;
    }
  }
  sum = sum_of(sum, lanes);
  const unsigned octet = vector / kOctet, place = vector % kOctet, steps = lanes.width / 4;
  if (octet >= shape.tasks * shape.octets) return;
  store16(shape.queries + (static_cast<std::size_t>(octet) * steps + j) * kWarp + place * 4 + i,
          make_uint4(words[0], words[1], words[2], words[3]));
  if (lanes.own == 0) {
    // Never zero, so that what is hidden stays so.
    const float unit = finite ? fmaxf(most / kLevels * store.unit, kLeastUnit) : __uint_as_float(0x7fc00000u);
    shape.units[vector] = make_float2(unit, static_cast<float>(sum));
  }
}

// Warps of queries, then of keys, then of values.
template <class T, int Bits>
GRAPHROT_KERNEL(kStoreThreads) store_kernel(const StoreShape store) {
  const AttendShape& shape = store.attend;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, per_warp = kWarp / store.width;
  unsigned group = blockIdx.x * kStoreWarps + warp;
  const bool is_query = group < store.query_warps;
  if (!is_query) group -= store.query_warps;
  const bool is_value = !is_query && group >= store.key_warps;
  if (is_value) group -= store.key_warps;
  if (is_value && group >= store.key_warps) return;  // the whole warp
  Lanes lanes{store.width, lane % store.width, false};
  lanes.used = lanes.own * kLaneChannels < shape.head_size;
  const unsigned vector = group * per_warp + lane / store.width;

  // Where it is read, and for keys and values where it goes.
  bool there;
  std::size_t from = 0, to = 0;
  if (is_query) {
    const unsigned task = vector / (shape.octets * kOctet), query = vector % (shape.octets * kOctet);
    const unsigned row = task / shape.kv_heads, head = task % shape.kv_heads * shape.group + query % shape.group;
    there = task < shape.tasks && query < shape.rows;
    from = (static_cast<std::size_t>(row) * shape.tokens + query / shape.group) * shape.heads + head;
  } else {
    const unsigned head = vector % shape.kv_heads, position = vector / shape.kv_heads;
    const unsigned row = position / shape.tokens, token = position % shape.tokens;
    there = row < shape.tasks / shape.kv_heads;
    from = vector;
    if (there) {
      const int start =
          start_of(shape.last_slots, row, static_cast<int>(shape.tokens), static_cast<int>(shape.slots));
      to = (static_cast<std::size_t>(row) * shape.kv_heads + head) * shape.slots + static_cast<unsigned>(start) + token;
    }
  }
  const void* const source = is_query ? store.query : is_value ? store.value : store.key;
  float x[kLaneChannels] = {};
  if (there && lanes.used) {
    load_channels(static_cast<const T*>(source) + from * shape.head_size + lanes.own * kLaneChannels, x);
  }
  // The vectors of a warp in shared memory.
  const auto all = shared_array<float>(warp * kWarp * kLaneChannels * 4, kWarp * kLaneChannels);
  const auto z = all.part(lane / store.width * store.width * kLaneChannels, store.width * kLaneChannels);
  const auto put = [&] {
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < kLaneChannels; k += 4) {
      z.vector<float4>(lanes.own * kLaneChannels + k) = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
    }
  };
  if (store.rotated && !is_value) {
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < kLaneChannels; ++k) x[k] *= store.rotation.scale;
    transform(static_cast<unsigned>(store.rotation.levels), x);
    if (store.rotation.order > 1) {
      put();
      __syncwarp();
      if (lanes.used) mix(store.rotation, z, lanes.own, x);
      __syncwarp();
    }
  }
  put();
  __syncwarp();
  if (is_query) {
    store_query<Bits>(store, lanes, x, z, vector);
  } else {
    std::uint8_t* const cache = is_value ? store.present_value : store.present_key;
    store_row<Bits>(shape, lanes, x, z, reinterpret_cast<unsigned*>(cache) + to * shape.row_words, there);
  }
}

template <class T>
void launch_store(const StoreShape& store, int bits, CudaStream stream) {
  const unsigned warps = store.query_warps + 2 * store.key_warps;
  const dim3 grid((warps + kStoreWarps - 1) / kStoreWarps), block(kStoreThreads);
  const std::size_t bytes = kStoreWarps * kWarp * kLaneChannels * sizeof(float);
  if (bits == 4) return launch(&store_kernel<T, 4>, grid, block, bytes, stream, store);
  return launch(&store_kernel<T, 8>, grid, block, bytes, stream, store);
}

}  // namespace

void store_vectors(const StoreShape& store, int bits, CudaStream stream) {
  switch (store.attend.element) {
    case Element::kFloat: return launch_store<float>(store, bits, stream);
    case Element::kHalf: return launch_store<Half>(store, bits, stream);
    case Element::kBFloat16: return launch_store<BFloat16>(store, bits, stream);
  }
}

void carry_rows(const std::uint8_t* past, std::uint8_t* present, std::size_t heads, std::size_t kept_words,
                std::size_t words, CudaStream stream) {
  const std::size_t pieces = (words + 3) / 4 + 1, each = std::size_t{kCarryPieces} * kCarryThreads;
  const auto blocks = static_cast<unsigned>((pieces + each - 1) / each);
  launch(&carry_kernel, dim3(static_cast<unsigned>(heads) * blocks), dim3(kCarryThreads), 0, stream,
         reinterpret_cast<const unsigned*>(past), reinterpret_cast<unsigned*>(present), kept_words, words, blocks);
}

}  // namespace graphrot::cuda
