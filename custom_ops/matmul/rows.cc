#include "matmul/rows.h"

namespace graphrot {

std::size_t rows_scratch_floats(const RowsProblem& problem) {
  const std::size_t row = rows_stride(problem.channels);
  if (problem.rotation == nullptr) return row;
  return row + hadamard_scratch_floats(*problem.rotation);
}

const RowsKernels& rows_kernels(Isa isa) {
  (void)isa;
  return rows_scalar();
}

}  // namespace graphrot
