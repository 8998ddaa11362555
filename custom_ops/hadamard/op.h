// graphrot::HadamardTransform as ONNX Runtime sees it, one operator per element type.
#pragma once

#include "ort/operator.h"

namespace graphrot {

struct HadamardOp : ort::ElementOp {
  static constexpr const char* kName = "HadamardTransform";

  HadamardOp(const ort::Api& api, Element element);
};

}  // namespace graphrot
