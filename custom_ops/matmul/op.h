// graphrot::RotatedMatMul as ONNX Runtime sees it, one operator per element type of the activations.
#pragma once

#include "ort/operator.h"

namespace graphrot {

struct RotatedMatMulOp : ort::ElementOp {
  static constexpr const char* kName = "RotatedMatMul";

  RotatedMatMulOp(const ort::Api& api, Element element);
};

}  // namespace graphrot
