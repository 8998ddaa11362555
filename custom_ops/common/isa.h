// Instruction sets: what the machine has, and which one the kernels use.
#pragma once

namespace graphrot {

enum class Isa { kScalar, kAvx2 };

const char* isa_name(Isa isa);

// True when this build contains the path and this machine can run it.
bool isa_available(Isa isa);

// The best available one, or the one that the environment variable GRAPHROT_ISA names.
// Throws std::invalid_argument when it names one that is unknown or not available.
Isa selected_isa();

}  // namespace graphrot
