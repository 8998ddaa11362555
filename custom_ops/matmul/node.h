// What a RotatedMatMul node says: attributes and constant inputs, checked.
#pragma once

#include <memory>
#include <vector>

#include "hadamard/hadamard.h"
#include "matmul/weights.h"
#include "ort/abi.h"

namespace graphrot {

struct MatMulNode {
  WeightSource weights;  // points into initializers of the session, and into `scales`
  int levels;
  std::unique_ptr<HadamardTransform> rotation;  // null: none
  std::vector<float> scales;
};

// Throws std::invalid_argument in words for people.
MatMulNode read_matmul_node(const ort::Api& api, const ort::KernelInfo* info);

}  // namespace graphrot
