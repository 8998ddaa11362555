// What a RotatedMatMul node says: attributes and constant inputs, checked.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hadamard/hadamard.h"
#include "matmul/weights.h"
#include "ort/abi.h"

namespace graphrot {

// Points into initializers of the session, except for the vectors.
struct MatMulNode {
  WeightsSource weights;
  int levels;
  std::unique_ptr<HadamardTransform> rotation;  // null: none
  std::vector<float> scales;
};

// Throws std::invalid_argument in words for people.
MatMulNode read_node(const ort::Api& api, const ort::KernelInfo* info);

}  // namespace graphrot
