// AVX2 with FMA and F16C. This file alone is compiled for them: it may be entered only after the check of
// common/isa.h, and it instantiates nothing that other files could share (see panel.h). For that reason the
// conversions of single values use intrinsics too, instead of the inline functions of common/element.h.
#include "hadamard/panel.h"

#if GRAPHROT_X86

#include "hadamard/vector_avx2.h"

namespace graphrot {
namespace {

constexpr HadamardKernels kKernels = panel::kernels<Avx2>();

}  // namespace

const HadamardKernels& hadamard_avx2() { return kKernels; }

}  // namespace graphrot

#endif
