#include "matmul/product.h"

namespace graphrot {

const ProductKernels& product_kernels(Isa isa) {
  (void)isa;
  return product_scalar();
}

std::size_t product_scratch_bytes(const ProductProblem& problem, std::size_t count) {
  (void)problem;
  (void)count;
  return 512 * 1024;
}

}  // namespace graphrot
