// One block of threads takes a row. A rotated row exists in shared memory alone; one that is not rotated is read twice.
// As on the CPU, the transform leaves out its scale, and is done again with it where that overflows.
#include "matmul/rows_cuda.h"

#include <stdexcept>
#include <string>

#include "common/cuda/launch.h"
#include "hadamard/cuda.cuh"
#include "matmul/rows.h"

namespace graphrot {
namespace cuda {
namespace {

constexpr unsigned kMostWarps = kMostThreads / kWarp;
constexpr unsigned kDataAt = 128;  // in shared memory; before it the results of warps
constexpr unsigned kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;

struct Row {
  unsigned channels, group, stride;
  float levels;
  Element element;
  bool interleaved, aligned;
};

// A sink: final values to shared memory, and the bits of the largest magnitude. As whole numbers, infinity is above all
// others and NaN above infinity.
struct Peak {
  static constexpr bool kInPlace = true;
  Shared<float> data;
  unsigned* bits;

  template <unsigned Count>
  GRAPHROT_DEVICE void see(const float (&x)[Count]) const {
    GRAPHROT_UNROLL
    for (const float value : x) *bits = max(*bits, __float_as_uint(value) & 0x7fffffffu);
  }

  GRAPHROT_DEVICE void take(unsigned at, unsigned count, const float* x) const {
    GRAPHROT_UNROLL
    for (unsigned e = 0; e < kVector; ++e) {
      if (e < count) *bits = max(*bits, __float_as_uint(x[e]) & 0x7fffffffu);
    }
    if (count == kVector) {
      store_vector(data, at, x);
      return;
    }
    GRAPHROT_UNROLL
    for (unsigned e = 0; e < kVector; ++e) {
      if (e < count) data[swizzled(at + e)] = x[e];
    }
  }
};

struct Most {
  GRAPHROT_DEVICE static unsigned of(unsigned a, unsigned b) { return max(a, b); }
};
struct Sum {
  GRAPHROT_DEVICE static unsigned of(unsigned a, unsigned b) { return a + b; }
};

// Of all threads, for all threads.
template <class Operation>
GRAPHROT_DEVICE unsigned reduce(unsigned value, Shared<unsigned> results) {
  GRAPHROT_UNROLL
  for (unsigned lanes = 1; lanes < kWarp; lanes *= 2) {
    value = Operation::of(value, __shfl_xor_sync(kAllLanes, value, static_cast<int>(lanes)));
  }
  if (threadIdx.x % kWarp == 0) results[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = results[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) value = Operation::of(value, results[warp]);
  __syncthreads();  // the results may be overwritten
  return value;
}

struct Scales {
  float scale, inverse;
};

GRAPHROT_DEVICE Scales scales_of(float largest, float missing, float levels) {
  const float magnitude = fabsf(__fmul_rn(largest, missing));
  if (magnitude > kRowEpsilon) {
    return {__fdiv_rn(magnitude, levels), __fdiv_rn(missing < 0.0f ? -levels : levels, largest)};
  }
  return {__fdiv_rn(kRowEpsilon, levels), __fdiv_rn(__fmul_rn(missing, levels), kRowEpsilon)};
}

GRAPHROT_DEVICE unsigned four_codes(int a, int b, int c, int d) {
  return (static_cast<unsigned>(a) & 0xffu) | (static_cast<unsigned>(b) & 0xffu) << 8 |
         (static_cast<unsigned>(c) & 0xffu) << 16 | static_cast<unsigned>(d) << 24;
}

// Where channel i stands among its 32.
GRAPHROT_DEVICE unsigned interleaved_place(unsigned i) { return (i & ~31u) | (i & 1u) << 4 | (i >> 1 & 15u); }

// Sums of groups of any size, by reading the codes again.
GRAPHROT_DEVICE void sum_codes(const Row& row, const std::int8_t* codes, std::int32_t* sums) {
  __syncthreads();
  const unsigned groups = (row.channels + row.group - 1) / row.group;
  for (unsigned g = threadIdx.x; g < groups; g += blockDim.x) {
    const unsigned end = min((g + 1) * row.group, row.channels);
    int sum = 0;
    for (unsigned i = g * row.group; i < end; ++i) sum += codes[row.interleaved ? interleaved_place(i) : i];
    sums[g] = sum;
  }
}

// Codes of one row, from `load(channel, x)`, eight at a time.
template <class Load>
GRAPHROT_DEVICE void quantize(const Row& row, const Load& load, float inverse, std::int8_t* codes, std::int32_t* sums,
                              Shared<unsigned> results) {
  const unsigned lane = threadIdx.x % kWarp, vectors = row.stride / kVector;
  const bool whole = row.group >= row.channels;
  // Groups inside a warp's codes are summed by its lanes.
  const bool power = (row.group & (row.group - 1)) == 0;
  const bool inside = !whole && power && row.group >= kVector && row.group <= kWarp * kVector;
  int total = 0;
  GRAPHROT_NO_UNROLL
  for (unsigned first = threadIdx.x - lane; first < vectors; first += blockDim.x) {
    const unsigned at = (first + lane) * kVector;
    int sum = 0;
    if (at < row.stride) {
      float x[kVector];
      int c[kVector];
      load(at, x);
      GRAPHROT_UNROLL
      for (unsigned e = 0; e < kVector; ++e) {
        c[e] = at + e < row.channels ? __float2int_rn(__fmul_rn(x[e], inverse)) : 0;
        sum += c[e];
      }
      if (row.interleaved) {
        auto* const even = reinterpret_cast<unsigned*>(codes + interleaved_place(at));
        even[0] = four_codes(c[0], c[2], c[4], c[6]);
        even[4] = four_codes(c[1], c[3], c[5], c[7]);
      } else {
        *reinterpret_cast<uint2*>(codes + at) =
            make_uint2(four_codes(c[0], c[1], c[2], c[3]), four_codes(c[4], c[5], c[6], c[7]));
      }
    }
    if (inside) {
      for (unsigned lanes = 1; lanes < row.group / kVector; lanes *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, static_cast<int>(lanes));
      }
      if (at % row.group == 0 && at < row.channels) sums[at / row.group] = sum;
    }
    total += sum;
  }
  if (whole) {
    const unsigned sum = reduce<Sum>(static_cast<unsigned>(total), results);
    if (threadIdx.x == 0) *sums = static_cast<int>(sum);
  } else if (!inside) {
    sum_codes(row, codes, sums);
  }
}

template <bool Rotated>
GRAPHROT_KERNEL(kMostThreads) quantize_rows(const void* in, Row row, Rotation rotation, CudaRows out) {
  const Shared<unsigned> results = shared_array<unsigned>(0, kMostWarps);
  const GlobalIn from(in, std::size_t{blockIdx.x} * row.channels, row.element, row.aligned);
  const unsigned groups = (row.channels + row.group - 1) / row.group;
  std::int8_t* const codes = out.codes + std::size_t{blockIdx.x} * out.stride;
  std::int32_t* const sums = out.sums + std::size_t{blockIdx.x} * groups;
  float missing = 1.0f;
  unsigned bits = kInfinityBits;
  Shared<float> data;
  if constexpr (Rotated) {
    data = shared_array<float>(kDataAt, swizzled_floats(row.channels));
    missing = rotation.scale;
    GRAPHROT_NO_UNROLL
    for (unsigned attempt = missing <= 1.0f ? 0 : 1; attempt < 2 && bits >= kInfinityBits; ++attempt) {
      unsigned own = 0;
      transform(rotation, from, row.channels, attempt == 0 ? 1.0f : rotation.scale, data, Peak{data, &own});
      if (attempt == 1) missing = 1.0f;
      bits = reduce<Most>(own, results);
    }
  } else {
    unsigned own = 0;
    for (unsigned at = threadIdx.x * kVector; at < row.channels; at += blockDim.x * kVector) {
      float x[kVector];
      from.load<1>(at, 0, row.channels, x);
      GRAPHROT_UNROLL
      for (unsigned e = 0; e < kVector; ++e) own = max(own, __float_as_uint(x[e]) & 0x7fffffffu);
    }
    bits = reduce<Most>(own, results);
  }
  const Scales scales = scales_of(__uint_as_float(bits), missing, row.levels);
  if (bits >= kInfinityBits || __float_as_uint(scales.scale) >= kInfinityBits) {
    if (threadIdx.x == 0) out.scales[blockIdx.x] = __uint_as_float(kNanBits);
    for (unsigned at = threadIdx.x * kVector; at < row.stride; at += blockDim.x * kVector) {
      *reinterpret_cast<uint2*>(codes + at) = make_uint2(0, 0);
    }
    for (unsigned g = threadIdx.x; g < groups; g += blockDim.x) sums[g] = 0;
    return;
  }
  if (threadIdx.x == 0) out.scales[blockIdx.x] = scales.scale;
  if constexpr (Rotated) {
    const auto load = [data](unsigned at, float (&x)[kVector]) { load_vector(data, at, x); };
    const unsigned written = (row.channels + kVector - 1) / kVector * kVector;
    const auto within = [&](unsigned at, float (&x)[kVector]) {
      if (at < written) return load(at, x);
      for (float& value : x) value = 0.0f;
    };
    quantize(row, within, scales.inverse, codes, sums, results);
  } else {
    const auto load = [&](unsigned at, float (&x)[kVector]) { from.load<1>(at, 0, row.channels, x); };
    quantize(row, load, scales.inverse, codes, sums, results);
  }
}

std::size_t shared_bytes(std::size_t channels) { return kDataAt + swizzled_floats(channels) * sizeof(float); }

unsigned threads_for(const CudaRowsProblem& problem, std::size_t rows) {
  std::size_t work = (problem.channels + kHeld / 2 - 1) / (kHeld / 2), groups = 0;
  if (problem.rotation != nullptr && problem.rotation->order > 1) {
    groups = (problem.rotation->order + kTile - 1) / kTile;
    const std::size_t width = problem.rotation->size / problem.rotation->order;
    work = groups * (problem.channels / problem.rotation->size) * ((width + kVector - 1) / kVector);
  }
  return block_threads(work, rows, groups, problem.channels);
}

}  // namespace
}  // namespace cuda

void check_cuda_rows(const CudaRowsProblem& problem, const CudaDevice& device) {
  if (problem.rotation == nullptr) return;
  check_cuda_hadamard(problem.rotation->size, problem.rotation->order, device);
  if (cuda::shared_bytes(problem.channels) > device.shared_bytes) {
    throw std::invalid_argument("attribute 'K' is " + std::to_string(problem.channels) +
                                ": on CUDA such a rotated row takes " +
                                std::to_string(cuda::shared_bytes(problem.channels)) +
                                " bytes of a block's shared memory, and this device has " +
                                std::to_string(device.shared_bytes));
  }
}

void rows_cuda(const CudaRowsProblem& problem, Element element, const void* in, std::size_t rows, const CudaRows& out,
               CudaStream stream) {
  if (rows == 0) return;
  const std::size_t bytes = problem.channels * (element == Element::kFloat ? 4 : 2);
  const bool aligned = reinterpret_cast<std::uintptr_t>(in) % 16 == 0 && bytes % 16 == 0;
  const cuda::Row row{static_cast<unsigned>(problem.channels),
                      static_cast<unsigned>(problem.group),
                      static_cast<unsigned>(rows_stride(problem.channels)),
                      static_cast<float>(problem.levels),
                      element,
                      problem.interleaved,
                      aligned};
  const auto grid = static_cast<unsigned>(rows);
  const unsigned threads = cuda::threads_for(problem, rows);
  if (problem.rotation == nullptr) {
    launch(cuda::quantize_rows<false>, grid, threads, cuda::kDataAt, stream, in, row, cuda::Rotation{}, out);
  } else {
    launch(cuda::quantize_rows<true>, grid, threads, cuda::shared_bytes(problem.channels), stream, in, row,
           cuda::rotation_of(*problem.rotation), out);
  }
}

}  // namespace graphrot
