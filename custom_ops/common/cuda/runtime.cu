// The CUDA runtime, behind launch.h and runtime.h.
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/cuda/launch.h"

namespace graphrot {
namespace {

constexpr std::size_t kSharedUnasked = 48 * 1024;  // more must be asked for, kernel by kernel

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // said once
  throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "a property of the device cannot be read");
  return value;
}

void allow_shared_bytes(const void* kernel, std::size_t bytes) {
  struct Allowed {
    const void* kernel;
    int device;
    std::size_t bytes;
  };
  static std::mutex mutex;
  static std::vector<Allowed> all;
  int device = 0;
  check(cudaGetDevice(&device), "there is no current device");
  const std::lock_guard<std::mutex> lock(mutex);
  Allowed* found = nullptr;
  for (Allowed& each : all) {
    if (each.kernel == kernel && each.device == device) found = &each;
  }
  if (found != nullptr && found->bytes >= bytes) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "a kernel cannot have so much shared memory");
  if (found != nullptr) {
    found->bytes = bytes;
  } else {
    all.push_back({kernel, device, bytes});
  }
}

}  // namespace

CudaDevice current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "there is no current device");
  return {attribute(cudaDevAttrComputeCapabilityMajor, device), attribute(cudaDevAttrComputeCapabilityMinor, device),
          attribute(cudaDevAttrMultiProcessorCount, device),
          static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device))};
}

void copy_to_device(void* device, const void* host, std::size_t bytes) {
  check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "memory of the device cannot be filled");
  // Bytes on their way to the device may still be so, and the streams of a session do not wait for this one.
  check(cudaStreamSynchronize(nullptr), "memory of the device cannot be filled");
}

void copy_to_host(void* host, const void* device, std::size_t bytes) {
  check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "memory of the device cannot be read");
}

namespace cuda::detail {

void launch(const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes, CudaStream stream, void** arguments) {
  if (shared_bytes > kSharedUnasked) allow_shared_bytes(kernel, shared_bytes);
  check(cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, static_cast<cudaStream_t>(stream)),
        "a kernel cannot be started");
}

}  // namespace cuda::detail
}  // namespace graphrot
