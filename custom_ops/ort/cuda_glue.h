// What the CUDA operators have in common: memory of the session on the device, and the stream of a call. A call queues
// work on that stream and returns: it waits for nothing and asks CUDA for no memory, so that it can be captured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cuda/runtime.h"
#include "ort/abi.h"
#include "ort/glue.h"
#include "ort/operator.h"

namespace graphrot::ort {

// The provider's allocator, held as long as the kernel.
class DeviceAllocator {
 public:
  DeviceAllocator(const Api& api, const KernelInfo* info);
  ~DeviceAllocator();
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;

  const Api& api() const { return api_; }
  void* allocate(std::size_t bytes) const;
  // Memory of `allocate` or `scratch`.
  void free(void* memory) const;
  // Working memory that is used in the order of the call's stream: it may be freed as soon as the work is queued.
  void* scratch(const KernelContext* context, std::size_t bytes) const;

 private:
  Api api_;
  Allocator* allocator_ = nullptr;
  const MemoryInfo* memory_ = nullptr;  // the allocator's
};

// Bytes that go to the device when a kernel is made, and stay as long as it.
class DeviceBytes {
 public:
  // `allocator` must live longer.
  DeviceBytes(const DeviceAllocator& allocator, const std::vector<std::uint8_t>& bytes);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  const void* data() const { return data_; }  // null where there are none

 private:
  const DeviceAllocator& allocator_;
  void* data_ = nullptr;
};

// Working memory of one call, in parts that start at multiples of kAlignment.
class DeviceScratch {
 public:
  static constexpr std::size_t kAlignment = 256;
  static constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  DeviceScratch(const DeviceAllocator& allocator, const KernelContext* context, std::size_t bytes);
  ~DeviceScratch();
  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;

  void* data() const { return data_; }  // null where no byte was asked for

 private:
  const DeviceAllocator& allocator_;
  void* data_ = nullptr;
};

// The stream that the work of a call is queued on.
CudaStream stream_of(const Api& api, const KernelContext* context);

// Throws std::runtime_error, in words for people, where the current device cannot run the kernels.
void check_device();

// Makes an operator of the CPU one of the CUDA provider.
template <class Kernel>
void move_to_cuda(ElementOp* op) {
  fill_kernel<Kernel>(op);
  op->GetExecutionProviderType = [](const CustomOp*) -> const char* { return "CUDAExecutionProvider"; };
}

}  // namespace graphrot::ort
