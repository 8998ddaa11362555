// graphrot::RotatedAttention of the CUDA provider, one operator per element type.
#pragma once

#include "attention/op.h"

namespace graphrot {

struct CudaRotatedAttentionOp : RotatedAttentionOp {
  CudaRotatedAttentionOp(const ort::Api& api_table, Element type);
};

}  // namespace graphrot
