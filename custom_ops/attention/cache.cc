#include "attention/cache.h"

namespace graphrot {

const CacheKernels& cache_kernels(Isa isa) {
#if GRAPHROT_X86
  if (isa >= Isa::kAvx2) return cache_avx2();  // what comes after it has it too
#endif
  (void)isa;
  return cache_scalar();
}

}  // namespace graphrot
