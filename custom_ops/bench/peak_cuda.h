// What the tensor cores of the device do at most with bytes, by the instruction that our product uses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"

namespace graphrot::bench {

// Sums of products that do not wait for each other, per warp.
inline constexpr int kPeakSums = 8;
inline constexpr unsigned kPeakThreads = 256;

// Operations (a multiplication and an addition are two) of one launch.
double peak_operations(unsigned blocks, unsigned rounds);

// `out` holds blocks * kPeakThreads numbers; all depend on all products.
void launch_peak(unsigned blocks, unsigned rounds, std::int32_t* out, CudaStream stream);

}  // namespace graphrot::bench
