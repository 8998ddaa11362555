// What a RotatedAttention node says: attributes, checked.
#pragma once

#include <memory>

#include "attention/attention.h"
#include "hadamard/hadamard.h"
#include "ort/abi.h"

namespace graphrot {

struct AttentionNode {
  AttentionForm form;
  std::unique_ptr<HadamardTransform> rotation;  // null: none
  bool masked;                                  // there is a mask among the inputs
};

// Throws std::invalid_argument in words for people.
AttentionNode read_attention_node(const ort::Api& api, const ort::KernelInfo* info);

// Where the tensors of a call are. On a device only total_sequence_length can be read here, so that seqlens_k and what
// the mask must reach are for the kernels to mind.
enum class Tensors { kHere, kOnDevice };

// The inputs of a call and room for its outputs, checked. Throws std::invalid_argument in words for people.
AttentionCall read_attention_call(const ort::Api& api, ort::KernelContext* context, const AttentionForm& form,
                                  bool masked, Tensors where);

}  // namespace graphrot
