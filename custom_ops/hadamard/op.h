// graphrot::HadamardTransform as ONNX Runtime sees it, one operator per element type.
#pragma once

#include "common/element.h"
#include "ort/abi.h"

namespace graphrot {

struct HadamardOp : ort::CustomOp {
  static constexpr const char* kName = "HadamardTransform";

  HadamardOp(const ort::Api& api, Element element);

  ort::Api api;  // shape inference is called without one
  Element element;
};

}  // namespace graphrot
