// graphrot::HadamardTransform of the CUDA provider, one operator per element type.
#pragma once

#include "hadamard/op.h"

namespace graphrot {

struct CudaHadamardOp : HadamardOp {
  CudaHadamardOp(const ort::Api& api, Element element);
};

}  // namespace graphrot
