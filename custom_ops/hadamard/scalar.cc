// The path for every machine: plain C++.
#include "hadamard/panel.h"
#include "hadamard/vector_plain.h"

namespace graphrot {
namespace {

constexpr HadamardKernels kKernels = panel::kernels<Plain>();

}  // namespace

const HadamardKernels& hadamard_scalar() { return kKernels; }

}  // namespace graphrot
