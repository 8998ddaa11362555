// The operator: transforms of the smallest sizes stay inside a warp, others in a block's shared memory.
#include "hadamard/cuda.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "common/cuda/launch.h"
#include "hadamard/cuda.cuh"

namespace graphrot {
namespace cuda {
namespace {

constexpr unsigned kUnitThreads = 128;
constexpr std::size_t kLeastSpan = 2048;  // channels that a block takes, if there are as many

bool aligned16(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }

GRAPHROT_KERNEL(kUnitThreads) hadamard_units(const void* in, void* out, std::size_t channels, unsigned levels,
                                             float scale, Element element, bool aligned) {
  const std::size_t first = (std::size_t{blockIdx.x} * (kUnitThreads / kWarp) + threadIdx.x / kWarp) * kUnit;
  if (first >= channels) return;  // a whole warp
  const unsigned count = channels - first < kUnit ? static_cast<unsigned>(channels - first) : kUnit;
  float x[kHeld];
  load_unit(GlobalIn(in, first, element, aligned), 0, count, scale, x);
  mix_unit(x, levels);
  const GlobalOut sink(out, first, count, element, aligned);
  GRAPHROT_UNROLL
  for (unsigned v = 0; v < kVectors; ++v) sink.take(unit_place(v), kVector, x + v * kVector);
}

GRAPHROT_KERNEL(kMostThreads) hadamard_spans(const void* in, void* out, std::size_t channels, unsigned span,
                                             Rotation rotation, Element element, bool aligned) {
  const std::size_t first = std::size_t{blockIdx.x} * span;
  const unsigned count = channels - first < span ? static_cast<unsigned>(channels - first) : span;
  const Shared<float> data = shared_array<float>(0, swizzled_floats(span));
  transform(rotation, GlobalIn(in, first, element, aligned), count, rotation.scale, data,
            GlobalOut(out, first, count, element, aligned));
}

// Blocks that one block of threads takes.
std::size_t blocks_together(std::size_t size) {
  std::size_t together = 1;
  while (together * size < kLeastSpan) together *= 2;
  return together;
}

}  // namespace
}  // namespace cuda

std::vector<std::uint8_t> cuda_factor(std::size_t order, const std::vector<float>& factor) {
  if (order == 1) return {};
  const std::size_t padded = cuda::divide_up(order, kCudaFactorPad) * kCudaFactorPad;
  std::vector<std::uint8_t> bytes(order * padded * sizeof(float), 0);
  for (std::size_t k = 0; k < order; ++k) {
    std::memcpy(bytes.data() + k * padded * sizeof(float), factor.data() + k * order, order * sizeof(float));
  }
  return bytes;
}

void check_cuda_hadamard(std::size_t size, std::size_t order, const CudaDevice& device) {
  if (order == 1 && size <= cuda::kUnit) return;
  if (order > cuda::kMostOrder) {
    throw std::invalid_argument("attribute 'factor' has order " + std::to_string(order) + "; on CUDA it is at most " +
                                std::to_string(cuda::kMostOrder));
  }
  const std::size_t span = cuda::blocks_together(size) * size, bytes = cuda::swizzled_floats(span) * sizeof(float);
  if (bytes > device.shared_bytes) {
    throw std::invalid_argument("attribute 'size' is " + std::to_string(size) + ": on CUDA such a transform takes " +
                                std::to_string(bytes) + " bytes of a block's shared memory, and this device has " +
                                std::to_string(device.shared_bytes));
  }
}

void hadamard_cuda(const CudaHadamard& problem, Element element, const void* in, void* out, std::size_t blocks,
                   CudaStream stream) {
  if (blocks == 0) return;
  const std::size_t channels = blocks * problem.size;
  const bool aligned = cuda::aligned16(in) && cuda::aligned16(out);
  if (problem.order == 1 && problem.levels <= cuda::kUnitLevels) {
    const std::size_t grid = cuda::divide_up(channels, cuda::kUnit * (cuda::kUnitThreads / cuda::kWarp));
    return launch(cuda::hadamard_units, static_cast<unsigned>(grid), cuda::kUnitThreads, 0, stream, in, out, channels,
                  static_cast<unsigned>(problem.levels), problem.scale, element, aligned);
  }
  const std::size_t together = cuda::blocks_together(problem.size), span = together * problem.size;
  std::size_t work = span / cuda::kHeld;
  if (problem.order > 1) {
    const std::size_t width = problem.size / problem.order;
    work = cuda::divide_up(problem.order, cuda::kTile) * cuda::divide_up(width, cuda::kVector) * together;
  }
  const std::size_t spans = cuda::divide_up(blocks, together);
  launch(cuda::hadamard_spans, static_cast<unsigned>(spans), cuda::block_threads(work, spans, 0, span),
         cuda::swizzled_floats(span) * sizeof(float), stream, in, out, channels, static_cast<unsigned>(span),
         cuda::rotation_of(problem), element, aligned && span % cuda::kVector == 0);
}

}  // namespace graphrot
