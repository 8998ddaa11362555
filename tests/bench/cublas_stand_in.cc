// Stands in for cuBLAS where there is no GPU: the calls that benchmarks/gpu_peers.py makes, by their definition.
#include <cstddef>

#include "common/element.h"

using graphrot::Half;

extern "C" int cublasCreate_v2(void** handle) {
  *handle = handle;
  return 0;
}

extern "C" int cublasDestroy_v2(void* handle) { return handle == nullptr; }

extern "C" int cublasSetStream_v2(void* handle, void* stream) { return handle == nullptr || stream != nullptr; }

extern "C" int cublasSetWorkspace_v2(void* handle, void* workspace, std::size_t bytes) {
  return handle == nullptr || workspace == nullptr || bytes != 256;
}

// c = alpha * op(a) * op(b) + beta * c, all in columns; float16 with sums in float alone.
extern "C" int cublasGemmEx(void* handle, int a_turned, int b_turned, int m, int n, int k, const float* alpha,
                            const Half* a, int a_type, int lda, const Half* b, int b_type, int ldb, const float* beta,
                            Half* c, int c_type, int ldc, int compute, int algorithm) {
  if (handle == nullptr || a_type != 2 || b_type != 2 || c_type != 2 || compute != 68 || algorithm != -1) return 7;
  if (lda < (a_turned ? k : m) || ldb < (b_turned ? n : k) || ldc < m) return 7;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int l = 0; l < k; ++l) {
        sum += to_float(a_turned ? a[i * lda + l] : a[l * lda + i]) * to_float(b_turned ? b[l * ldb + j] : b[j * ldb + l]);
      }
      sum *= *alpha;
      if (*beta != 0) sum += *beta * to_float(c[j * ldc + i]);
      from_float(sum, &c[j * ldc + i]);
    }
  }
  return 0;
}
