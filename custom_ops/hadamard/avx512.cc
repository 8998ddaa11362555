// AVX-512 (F, BW, DQ, VL). This file alone is compiled for it; the rules of avx2.cc hold here too.
#include "hadamard/panel.h"

#if GRAPHROT_X86

#include "hadamard/vector_avx512.h"

namespace graphrot {
namespace {

// Where blocks are copied together first, the pieces are too small for reads of 64 bytes, and a product with rows of
// one vector has too few tiles that can be summed side by side: there the path of half the width is faster.
template <class T, Element E>
void run(const HadamardProblem& problem, const void* in, void* out, std::size_t blocks, float* scratch) {
  const bool narrow = problem.order > 1 && problem.sums == nullptr && problem.levels <= Avx512::kLevels;
  if (problem.group > 1 || narrow) {
    return hadamard_avx2().run[static_cast<int>(E)](problem, in, out, blocks, scratch);
  }
  panel::run_long<Avx512>(problem, static_cast<const T*>(in), static_cast<T*>(out), blocks, scratch);
}

constexpr HadamardKernels kKernels = {
    {&run<float, Element::kFloat>, &run<Half, Element::kHalf>, &run<BFloat16, Element::kBFloat16>}};

}  // namespace

const HadamardKernels& hadamard_avx512() { return kKernels; }

}  // namespace graphrot

#endif
