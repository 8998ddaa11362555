// The input of a call of HadamardTransform, and room for its output.
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace graphrot {

struct HadamardCall {
  const void* in;
  void* out;
  std::size_t blocks;  // 0: there is nothing to do, and neither is looked for
};

// Throws std::invalid_argument, in words for people, when the input holds no whole blocks of `size` channels.
HadamardCall read_hadamard_call(const ort::Api& api, ort::KernelContext* context, std::size_t size);

}  // namespace graphrot
