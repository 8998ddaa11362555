#include "matmul/product.h"

#include "matmul/product_blocks.h"

namespace graphrot {

const ProductKernels& product_kernels(Isa isa) {
#if GRAPHROT_X86
  if (isa == Isa::kVnni) return product_vnni();
#endif
  (void)isa;
  return product_scalar();
}

std::size_t product_scratch_bytes(const ProductProblem&, std::size_t count) {
  const std::size_t rows = count < blocks::kRowBlock ? count : blocks::kRowBlock;
  return rows * kTileColumns * sizeof(float) + blocks::kPanelBytes;
}

}  // namespace graphrot
