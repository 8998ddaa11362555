// graphrot::RotatedMatMul as ONNX Runtime sees it, one operator per element type of the activations.
#pragma once

#include "common/element.h"
#include "ort/abi.h"

namespace graphrot {

struct RotatedMatMulOp : ort::CustomOp {
  static constexpr const char* kName = "RotatedMatMul";

  RotatedMatMulOp(const ort::Api& api, Element element);

  ort::Api api;  // shape inference is called without one
  Element element;
};

}  // namespace graphrot
