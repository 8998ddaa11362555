// The whole operator on CUDA: what is kept of the past, new rows, then every query attends to what is stored. All of it
// is put on a stream, without waiting and without memory of its own, and its shapes come from capacities: it can be
// captured in a graph, whose later runs read the lengths of their time. In plain C++.
#pragma once

#include <cstddef>

#include "attention/attention.h"
#include "common/cuda/runtime.h"
#include "common/element.h"
#include "hadamard/cuda.h"

namespace graphrot {

// Throws std::invalid_argument, in words for people, for what the kernels do not take. `rotation_size`: 0 for none.
void check_attention_cuda(const AttentionForm& form, std::size_t rotation_size);

// Of memory that a call needs while it runs, from its batch, tokens and slots, on the current device.
std::size_t attention_cuda_scratch_bytes(const AttentionForm& form, const AttentionCall& call);

// All pointers of the call are the device's. Where a past is its present the slots are the same. Lengths that do not
// fit the cache are cut, since nobody can look at them in time; what can be seen here is refused in words.
// `rotation`: of queries and keys; null for none. `scratch` begins on 256 bytes.
void attention_cuda(const AttentionForm& form, const CudaHadamard* rotation, Element element, const AttentionCall& call,
                    void* scratch, CudaStream stream);

}  // namespace graphrot
