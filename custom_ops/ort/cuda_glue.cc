#include "ort/cuda_glue.h"

#include <new>
#include <stdexcept>
#include <string>

namespace graphrot::ort {
namespace {

constexpr int kLeastMajor = 8;  // products of bytes in tiles, and copies to shared memory behind a kernel's back

}  // namespace

DeviceAllocator::DeviceAllocator(const Api& api, const KernelInfo* info) : api_(api) {
  check(api, api.call<slot::KernelInfoGetAllocator>(info, kDefaultMemory, &allocator_));
  try {
    check(api, api.call<slot::AllocatorGetInfo>(static_cast<const Allocator*>(allocator_), &memory_));
  } catch (...) {
    api.call<slot::ReleaseAllocator>(allocator_);
    throw;
  }
}

DeviceAllocator::~DeviceAllocator() { api_.call<slot::ReleaseAllocator>(allocator_); }

void* DeviceAllocator::allocate(std::size_t bytes) const {
  void* memory = nullptr;
  check(api_, api_.call<slot::AllocatorAlloc>(allocator_, bytes, &memory));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void DeviceAllocator::free(void* memory) const {
  Status* const status = api_.call<slot::AllocatorFree>(allocator_, memory);
  if (status != nullptr) api_.call<slot::ReleaseStatus>(status);  // nothing that a kernel could do about it
}

void* DeviceAllocator::scratch(const KernelContext* context, std::size_t bytes) const {
  void* memory = nullptr;
  check(api_, api_.call<slot::KernelContext_GetScratchBuffer>(context, memory_, bytes, &memory));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

DeviceBytes::DeviceBytes(const DeviceAllocator& allocator, const std::vector<std::uint8_t>& bytes)
    : allocator_(allocator) {
  if (bytes.empty()) return;
  data_ = allocator.allocate(bytes.size());
  try {
    copy_to_device(data_, bytes.data(), bytes.size());
  } catch (...) {
    allocator.free(data_);
    throw;
  }
}

DeviceBytes::~DeviceBytes() {
  if (data_ != nullptr) allocator_.free(data_);
}

DeviceScratch::DeviceScratch(const DeviceAllocator& allocator, const KernelContext* context, std::size_t bytes)
    : allocator_(allocator), data_(bytes == 0 ? nullptr : allocator.scratch(context, bytes)) {}

DeviceScratch::~DeviceScratch() {
  if (data_ != nullptr) allocator_.free(data_);
}

CudaStream stream_of(const Api& api, const KernelContext* context) {
  void* stream = nullptr;
  check(api, api.call<slot::KernelContext_GetGPUComputeStream>(context, &stream));
  return stream;
}

void check_device() {
  const CudaDevice device = current_device();
  if (device.major >= kLeastMajor) return;
  throw std::runtime_error("the GPU has compute capability " + std::to_string(device.major) + "." +
                           std::to_string(device.minor) +
                           ", and graphrot's CUDA kernels need 8.0 or later (Ampere); run the model on the CPU provider");
}

}  // namespace graphrot::ort
