// What a RotatedMatMul node says: attributes and constant inputs, checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hadamard/hadamard.h"
#include "matmul/weights.h"
#include "ort/abi.h"

namespace graphrot {

// With tensors as the session has them, which may be on a device: their types and shapes are checked, and no element is
// looked at.
struct MatMulForm {
  WeightSource weights;  // `scales` is null
  const void* scales;
  bool half_scales;  // float16, else float
  int levels;
  std::unique_ptr<HadamardTransform> rotation;  // null: none
};

struct MatMulNode {
  WeightSource weights;  // points into initializers of the session, and into `scales`
  int levels;
  std::unique_ptr<HadamardTransform> rotation;  // null: none
  std::vector<float> scales;
};

// All throw std::invalid_argument in words for people.
MatMulForm read_matmul_form(const ort::Api& api, const ort::KernelInfo* info);
MatMulNode read_matmul_node(const ort::Api& api, const ort::KernelInfo* info);

struct MatMulCall {
  const void* in;    // [rows, K]
  void* out;         // [rows, N]
  std::size_t rows;  // 0: there is nothing to do, and neither is looked for
};

// The input of a call and room for its output. Throws std::invalid_argument in words for people.
MatMulCall read_matmul_call(const ort::Api& api, ort::KernelContext* context, std::size_t channels,
                            std::size_t columns);

// The zero points that matter: null where all say the middle, for which kernels are faster without. With one scale for
// a row, all of it must say the same.
const std::uint8_t* telling_zeros(const WeightSource& weights);
// Bytes of the zero points of `weights`.
std::size_t zeros_bytes(const WeightSource& weights);

}  // namespace graphrot
