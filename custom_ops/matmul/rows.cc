#include "matmul/rows.h"

namespace graphrot {

std::size_t rows_scratch_floats(const RowsProblem& problem) {
  const std::size_t row = rows_stride(problem.channels);
  if (problem.rotation == nullptr) return row;
  return row + 2 * problem.rotation->size * problem.rotation->group;
}

const RowsKernels& rows_kernels(Isa isa) {
  (void)isa;
  return rows_scalar();
}

}  // namespace graphrot
