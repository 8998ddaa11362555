// The transform of a node, from its attributes. Both throw std::invalid_argument in words for people.
#pragma once

#include "hadamard/hadamard.h"
#include "ort/abi.h"

namespace graphrot {

HadamardTransform read_transform(const ort::Api& api, const ort::KernelInfo* info);

// Refuses a node whose attributes for the function body say something else than those for the kernel.
void check_body_attributes(const ort::Api& api, const ort::KernelInfo* info, const HadamardProblem& problem);

}  // namespace graphrot
