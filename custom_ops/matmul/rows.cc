#include "matmul/rows.h"

namespace graphrot {

std::size_t rows_scratch_floats(const RowsProblem& problem) {
  const std::size_t row = rows_stride(problem.channels);
  if (problem.rotation == nullptr) return row;
  return row + hadamard_scratch_floats(*problem.rotation);
}

const RowsKernels& rows_kernels(Isa isa) {
#if GRAPHROT_X86
  if (isa >= Isa::kAvx512) return rows_avx512();  // what comes after it has it too
  if (isa == Isa::kAvx2) return rows_avx2();
#endif
  (void)isa;
  return rows_scalar();
}

}  // namespace graphrot
