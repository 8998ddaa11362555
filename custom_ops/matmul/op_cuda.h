// graphrot::RotatedMatMul of the CUDA provider, one operator per element type of the activations.
#pragma once

#include "matmul/op.h"

namespace graphrot {

struct CudaRotatedMatMulOp : RotatedMatMulOp {
  CudaRotatedMatMulOp(const ort::Api& api, Element element);
};

}  // namespace graphrot
