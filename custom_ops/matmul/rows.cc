#include "matmul/rows.h"

#include <stdexcept>
#include <string>

namespace graphrot {

void check_rows(const RowsProblem& problem) {
  if (problem.levels != 127 && problem.levels != 7) {
    throw std::invalid_argument("activations are rounded to 8 or 4 bits: 127 or 7 levels, not " +
                                std::to_string(problem.levels));
  }
  if (problem.rotation != nullptr && problem.channels % problem.rotation->size != 0) {
    throw std::invalid_argument("attribute 'K' is " + std::to_string(problem.channels) +
                                ", which is no multiple of the transform's size " +
                                std::to_string(problem.rotation->size));
  }
}

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
