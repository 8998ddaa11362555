// The runs of one query become one: a block a query, groups of threads that take every so many runs, eight channels
// each.
#include "attention/attend_cuda.cuh"
#include "common/cuda/launch.h"

namespace graphrot::cuda {
namespace {

constexpr unsigned kCombineThreads = 128;

GRAPHROT_KERNEL(kCombineThreads) combine_runs_kernel(const AttendShape shape) {
  const unsigned head = blockIdx.x % shape.heads, position = blockIdx.x / shape.heads;
  const unsigned token = position % shape.tokens, row = position / shape.tokens;
  const unsigned own = token * shape.group + head % shape.group;
  const unsigned task = row * shape.kv_heads + head / shape.group, query = own % shape.tile_rows;
  const Place place = place_of(shape, task, own / shape.tile_rows, 0);
  const auto at = [&](unsigned run) { return (place.part + run) * static_cast<std::size_t>(shape.tile_rows) + query; };

  float most = minus_infinity();
  for (unsigned run = threadIdx.x % kWarp; run < place.runs; run += kWarp) most = fmaxf(most, shape.totals[at(run)].x);
  GRAPHROT_UNROLL
  for (unsigned lanes = 1; lanes < kWarp; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, lanes));

  const unsigned width = shape.head_size / 8, groups = kCombineThreads / width;
  const unsigned group = threadIdx.x / width, channel = threadIdx.x % width * 8;
  float x[8] = {}, total = 0.0f;
  if (group < groups) {
    for (unsigned run = group; run < place.runs; run += groups) {
      const float2 numbers = shape.totals[at(run)];
      const float share = numbers.x == most ? 1.0f : power_of_two(numbers.x - most);
      const float* const from = shape.sums + at(run) * shape.head_size + channel;
      float low[4], high[4];
      unpack<float>(load16(from), low);
      unpack<float>(load16(from + 4), high);
      total = fmaf(numbers.y, share, total);
      GRAPHROT_UNROLL
      for (unsigned k = 0; k < 4; ++k) {
        x[k] = fmaf(low[k], share, x[k]);
        x[k + 4] = fmaf(high[k], share, x[k + 4]);
      }
    }
  }
  // By channel, so that threads side by side touch words side by side.
  const auto shares = shared_array<float>(0, 9 * kCombineThreads);
  GRAPHROT_UNROLL
  for (unsigned k = 0; k < 8; ++k) shares[k * kCombineThreads + threadIdx.x] = x[k];
  shares[8 * kCombineThreads + threadIdx.x] = total;
  __syncthreads();
  if (group != 0) return;
  for (unsigned other = 1; other < groups; ++other) {
    const unsigned thread = other * width + threadIdx.x;
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < 8; ++k) x[k] += shares[k * kCombineThreads + thread];
    total += shares[8 * kCombineThreads + thread];
  }
  GRAPHROT_UNROLL
  for (unsigned k = 0; k < 8; ++k) x[k] = total == 0.0f ? 0.0f : __fdividef(x[k], total);
  put_elements(shape.output, static_cast<std::size_t>(blockIdx.x) * shape.head_size + channel, shape.element, x);
}

}  // namespace

void combine_runs(const AttendShape& shape, CudaStream stream) {
  const unsigned queries = shape.tasks / shape.kv_heads * shape.tokens * shape.heads;
  const std::size_t bytes = 9 * kCombineThreads * sizeof(float);
  launch(&combine_runs_kernel, dim3(queries), dim3(kCombineThreads), bytes, stream, shape);
}

}  // namespace graphrot::cuda
