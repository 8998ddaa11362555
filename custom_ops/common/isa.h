// Instruction sets: what the machine has, and which one the kernels use.
#pragma once

// The paths for x86 are compiled for 64-bit x86 alone, which is known only here: one build for macOS compiles
// every file for two architectures.
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(_M_ARM64EC)
#define GRAPHROT_X86 1
#else
#define GRAPHROT_X86 0
#endif

namespace graphrot {

// Each brings the ones before it along: kAvx512 is F, BW, DQ and VL, kVnni adds products of bytes, kAmx their tiles.
enum class Isa { kScalar, kAvx2, kAvx512, kVnni, kAmx };

// Best first.
inline constexpr Isa kIsas[] = {Isa::kAmx, Isa::kVnni, Isa::kAvx512, Isa::kAvx2, Isa::kScalar};

const char* isa_name(Isa isa);

// True when this build contains the path.
bool isa_built(Isa isa);

// True when this build contains the path and this machine, with its operating system, can run it.
bool isa_available(Isa isa);

// The best available one, or the one that the environment variable GRAPHROT_ISA names.
// Throws std::invalid_argument when it names one that is unknown or not available.
Isa selected_isa();

}  // namespace graphrot
