// Few rows by all weights, as fast as the weights are read. Included by the files of the product alone.
#pragma once

#include "common/cuda/launch.h"
#include "matmul/product_parts.cuh"

namespace graphrot {

// `bits` are those of the weights; at most kCudaGemvRows rows.
void gemv_cuda(int bits, bool grouped, const cuda::ProductArguments& arguments, const CudaDevice& device,
               CudaStream stream);

}  // namespace graphrot
