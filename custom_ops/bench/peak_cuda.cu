#include "bench/peak_cuda.h"

#include "common/cuda/launch.h"
#include "common/cuda/ptx.cuh"

namespace graphrot::bench {
namespace {

// Bytes that are neither zero nor all alike: a multiplication by zero takes less power, and may run at a higher clock.
GRAPHROT_DEVICE unsigned some_bytes(unsigned number) { return (number * 2654435761u) ^ 0x5b3da74eu; }

GRAPHROT_KERNEL(kPeakThreads) peak(unsigned rounds, std::int32_t* out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned a[4], b[2];
  for (unsigned i = 0; i < 4; ++i) a[i] = some_bytes(4 * thread + i) & 0x0f0f0f0fu;  // sums stay small
  for (unsigned i = 0; i < 2; ++i) b[i] = some_bytes(2 * thread + i) & 0x0f0f0f0fu;
  int sums[kPeakSums][4];
  GRAPHROT_UNROLL
  for (int i = 0; i < 4 * kPeakSums; ++i) sums[i / 4][i % 4] = i;  // all differ
  for (unsigned round = 0; round < rounds; ++round) {
    GRAPHROT_UNROLL
    for (int sum = 0; sum < kPeakSums; ++sum) cuda::mma_m16n8k32(sums[sum], a, b);
  }
  int total = 0;
  GRAPHROT_UNROLL
  for (int sum = 0; sum < kPeakSums; ++sum) {
    GRAPHROT_UNROLL
    for (int i = 0; i < 4; ++i) total ^= sums[sum][i];
  }
  out[thread] = total;
}

}  // namespace

double peak_operations(unsigned blocks, unsigned rounds) {
  return 2.0 * 16 * 8 * 32 * kPeakSums * (kPeakThreads / 32) * static_cast<double>(blocks) *
         static_cast<double>(rounds);
}

void launch_peak(unsigned blocks, unsigned rounds, std::int32_t* out, CudaStream stream) {
  launch(peak, dim3(blocks), dim3(kPeakThreads), 0, stream, rounds, out);
}

}  // namespace graphrot::bench
