// Starts a kernel on a stream. Included by files that hold kernels.
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

#include "common/cuda/device.cuh"
#include "common/cuda/runtime.h"

namespace graphrot {

#if !defined(GRAPHROT_CUDA_ON_CPU)

namespace cuda::detail {

// `arguments` are pointers to the kernel's parameters.
void launch(const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes, CudaStream stream, void** arguments);

template <class Parameters, std::size_t... I>
void launch(const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes, CudaStream stream,
            Parameters& parameters, std::index_sequence<I...>) {
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&std::get<I>(parameters)))...};
  launch(kernel, grid, block, shared_bytes, stream, arguments);
}

}  // namespace cuda::detail

#endif

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...). Throws std::runtime_error with CUDA's own text.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, CudaStream stream,
            Arguments&&... arguments) {
  std::tuple<Parameters...> parameters(std::forward<Arguments>(arguments)...);
#if defined(GRAPHROT_CUDA_ON_CPU)
  (void)stream;
  shim::launch(grid, block, shared_bytes, [&] { std::apply(kernel, parameters); });
#else
  cuda::detail::launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream, parameters,
                       std::index_sequence_for<Parameters...>{});
#endif
}

}  // namespace graphrot
