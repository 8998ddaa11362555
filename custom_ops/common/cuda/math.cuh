// Arithmetic that CUDA's C++ has no name for.
#pragma once

#include <cmath>

#include "common/cuda/device.cuh"

namespace graphrot::cuda {

// 2^x within two units in the last place, in one instruction. What is smaller than every normal number is zero.
GRAPHROT_DEVICE float power_of_two(float x) {
#if defined(GRAPHROT_CUDA_ON_CPU)
  return x < -126.0f ? 0.0f : std::exp2(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace graphrot::cuda
