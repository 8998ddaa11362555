// The operator graphrot::RotatedAttention of ONNX Runtime.
#pragma once

#include "ort/operator.h"

namespace graphrot {

struct RotatedAttentionOp : ort::ElementOp {
  static constexpr const char* kName = "RotatedAttention";

  RotatedAttentionOp(const ort::Api& api_table, Element type);
};

}  // namespace graphrot
