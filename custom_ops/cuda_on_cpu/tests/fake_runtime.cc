#include "cuda_on_cpu/tests/fake_runtime.h"

#include <array>
#include <cstring>
#include <new>
#include <utility>

namespace graphrot::fake {
namespace {

using ort::ElementType;
using ort::KernelContext;
using ort::KernelInfo;
using ort::Value;

struct Status {
  ort::ErrorCode code;
  std::string message;
};

ort::Status* failed(const std::string& message) {
  return reinterpret_cast<ort::Status*>(new Status{ort::kFail, message});
}

const Node& node_of(const KernelInfo* info) { return *reinterpret_cast<const Node*>(info); }
Call& call_of(const KernelContext* context) {
  return *const_cast<Call*>(reinterpret_cast<const Call*>(context));
}
Tensor& tensor_of(const Value* value) { return *const_cast<Tensor*>(reinterpret_cast<const Tensor*>(value)); }
const Tensor& tensor_of(const ort::TensorInfo* info) { return *reinterpret_cast<const Tensor*>(info); }

std::size_t bytes_of(ElementType type) {
  switch (type) {
    case ort::kFloat32: case ort::kInt32: return 4;
    case ort::kFloat16: case ort::kBFloat16: return 2;
    default: return 1;
  }
}

template <class Map>
ort::Status* look_up(const Map& map, const char* name, const typename Map::mapped_type** out) {
  const auto found = map.find(name);
  if (found == map.end()) return failed("there is no attribute " + std::string(name));
  *out = &found->second;
  return nullptr;
}

void* take(Memory& memory, std::size_t bytes) {
  if (memory.none_left) return nullptr;
  auto block = std::make_unique<shim::GuardedBytes>(bytes);
  void* const data = block->data();
  memory.taken[data] = std::move(block);
  return data;
}

ort::Status* copy_name(const std::string& name, char* out, std::size_t* size) {
  if (out != nullptr) std::memcpy(out, name.c_str(), name.size() + 1);
  *size = name.size() + 1;
  return nullptr;
}

template <class Slot>
void put(std::array<const void*, 512>& slots, typename Slot::Function function) {
  slots[Slot::kIndex] = reinterpret_cast<const void*>(function);
}

std::array<const void*, 512> make_table() {
  namespace slot = ort::slot;
  std::array<const void*, 512> slots{};
  put<slot::CreateStatus>(slots, [](ort::ErrorCode code, const char* message) {
    return reinterpret_cast<ort::Status*>(new Status{code, message});
  });
  put<slot::GetErrorCode>(slots, [](const ort::Status* status) { return reinterpret_cast<const Status*>(status)->code; });
  put<slot::GetErrorMessage>(
      slots, [](const ort::Status* status) { return reinterpret_cast<const Status*>(status)->message.c_str(); });
  put<slot::ReleaseStatus>(slots, [](ort::Status* status) { delete reinterpret_cast<Status*>(status); });

  put<slot::GetTensorMutableData>(slots, [](Value* value, void** out) -> ort::Status* {
    *out = tensor_of(value).memory->data();
    return nullptr;
  });
  put<slot::GetTensorTypeAndShape>(slots, [](const Value* value, ort::TensorInfo** out) -> ort::Status* {
    *out = reinterpret_cast<ort::TensorInfo*>(&tensor_of(value));
    return nullptr;
  });
  put<slot::ReleaseTensorTypeAndShapeInfo>(slots, [](ort::TensorInfo*) {});
  put<slot::GetTensorElementType>(slots, [](const ort::TensorInfo* info, ElementType* out) -> ort::Status* {
    *out = tensor_of(info).type;
    return nullptr;
  });
  put<slot::GetDimensionsCount>(slots, [](const ort::TensorInfo* info, std::size_t* out) -> ort::Status* {
    *out = tensor_of(info).shape.size();
    return nullptr;
  });
  put<slot::GetDimensions>(
      slots, [](const ort::TensorInfo* info, std::int64_t* values, std::size_t count) -> ort::Status* {
        for (std::size_t i = 0; i < count; ++i) values[i] = tensor_of(info).shape[i];
        return nullptr;
      });
  put<slot::ReleaseValue>(slots, [](Value*) {});

  put<slot::KernelInfoGetAttribute_int64>(
      slots, [](const KernelInfo* info, const char* name, std::int64_t* out) -> ort::Status* {
        const std::int64_t* found = nullptr;
        ort::Status* const status = look_up(node_of(info).ints, name, &found);
        if (status == nullptr) *out = *found;
        return status;
      });
  put<slot::KernelInfoGetAttribute_float>(
      slots, [](const KernelInfo* info, const char* name, float* out) -> ort::Status* {
        const float* found = nullptr;
        ort::Status* const status = look_up(node_of(info).floats, name, &found);
        if (status == nullptr) *out = *found;
        return status;
      });
  put<slot::KernelInfoGetAttributeArray_int64>(
      slots, [](const KernelInfo* info, const char* name, std::int64_t* out, std::size_t* count) -> ort::Status* {
        const std::vector<std::int64_t>* found = nullptr;
        ort::Status* const status = look_up(node_of(info).lists, name, &found);
        if (status != nullptr) return status;
        for (std::size_t i = 0; out != nullptr && i < found->size(); ++i) out[i] = (*found)[i];
        *count = found->size();
        return nullptr;
      });
  put<slot::GetAllocatorWithDefaultOptions>(slots, [](ort::Allocator** out) -> ort::Status* {
    *out = nullptr;
    return nullptr;
  });
  put<slot::KernelInfoGetAttribute_tensor>(
      slots, [](const KernelInfo* info, const char* name, ort::Allocator*, Value** out) -> ort::Status* {
        const Tensor* found = nullptr;
        ort::Status* const status = look_up(node_of(info).tensors, name, &found);
        if (status == nullptr) *out = reinterpret_cast<Value*>(const_cast<Tensor*>(found));
        return status;
      });
  put<slot::KernelInfo_GetInputCount>(slots, [](const KernelInfo* info, std::size_t* out) -> ort::Status* {
    *out = node_of(info).inputs.size();
    return nullptr;
  });
  put<slot::KernelInfo_GetInputName>(
      slots, [](const KernelInfo* info, std::size_t index, char* out, std::size_t* size) -> ort::Status* {
        return copy_name(node_of(info).inputs[index].name, out, size);
      });
  put<slot::KernelInfo_GetNodeName>(
      slots, [](const KernelInfo* info, char* out, std::size_t* size) -> ort::Status* {
        return copy_name(node_of(info).name, out, size);
      });
  put<slot::KernelInfoGetConstantInput_tensor>(
      slots, [](const KernelInfo* info, std::size_t index, int* constant, const Value** out) -> ort::Status* {
        const Tensor* const found = node_of(info).inputs[index].constant;
        *constant = found != nullptr;
        *out = reinterpret_cast<const Value*>(found);
        return nullptr;
      });
  put<slot::KernelInfoGetAllocator>(
      slots, [](const KernelInfo* info, ort::MemoryType type, ort::Allocator** out) -> ort::Status* {
        if (type != ort::kDefaultMemory) return failed("the host's memory is not asked for");
        *out = reinterpret_cast<ort::Allocator*>(node_of(info).memory);
        return nullptr;
      });
  put<slot::ReleaseAllocator>(slots, [](ort::Allocator*) {});
  put<slot::AllocatorGetInfo>(slots, [](const ort::Allocator* allocator, const ort::MemoryInfo** out) -> ort::Status* {
    *out = reinterpret_cast<const ort::MemoryInfo*>(allocator);
    return nullptr;
  });
  put<slot::AllocatorAlloc>(slots, [](ort::Allocator* allocator, std::size_t bytes, void** out) -> ort::Status* {
    auto* const memory = reinterpret_cast<Memory*>(allocator);
    ++memory->constants_taken;
    *out = take(*memory, bytes);
    return nullptr;
  });
  put<slot::AllocatorFree>(slots, [](ort::Allocator* allocator, void* data) -> ort::Status* {
    auto* const memory = reinterpret_cast<Memory*>(allocator);
    const auto found = memory->taken.find(data);
    if (found == memory->taken.end()) return failed("memory that was not taken is freed");
    memory->overwritten = memory->overwritten || !found->second->kept();
    memory->taken.erase(found);
    return nullptr;
  });

  put<slot::KernelContext_GetInput>(
      slots, [](const KernelContext* context, std::size_t index, const Value** out) -> ort::Status* {
        Call& call = call_of(context);
        *out = index < call.inputs.size() ? reinterpret_cast<const Value*>(call.inputs[index]) : nullptr;
        return nullptr;
      });
  put<slot::KernelContext_GetOutput>(
      slots,
      [](KernelContext* context, std::size_t index, const std::int64_t* dims, std::size_t count,
         Value** out) -> ort::Status* {
        Tensor& output = call_of(context).outputs[index];
        output.shape.assign(dims, dims + count);
        const std::size_t bytes = output.count() * bytes_of(output.type);
        if (output.memory == nullptr || output.memory->bytes() != bytes) {
          output.memory = std::make_shared<shim::GuardedBytes>(bytes);
        }
        *out = reinterpret_cast<Value*>(&output);
        return nullptr;
      });
  put<slot::KernelContext_ParallelFor>(
      slots,
      [](const KernelContext*, void (*function)(void*, std::size_t), std::size_t total, std::size_t,
         void* user) -> ort::Status* {
        for (std::size_t i = 0; i < total; ++i) function(user, i);
        return nullptr;
      });
  put<slot::KernelContext_GetGPUComputeStream>(slots, [](const KernelContext* context, void** out) -> ort::Status* {
    ++call_of(context).streams_asked;
    *out = nullptr;
    return nullptr;
  });
  put<slot::KernelContext_GetScratchBuffer>(
      slots,
      [](const KernelContext* context, const ort::MemoryInfo* info, std::size_t bytes, void** out) -> ort::Status* {
        Memory* const memory = call_of(context).memory;
        if (reinterpret_cast<const Memory*>(info) != memory) return failed("scratch of another device");
        ++memory->scratch_taken;
        *out = take(*memory, bytes);
        return nullptr;
      });
  return slots;
}

// The words of a status, which goes with them.
std::string words_of(ort::Status* status) {
  const std::unique_ptr<Status> own(reinterpret_cast<Status*>(status));
  return own != nullptr ? own->message : "";
}

}  // namespace

std::size_t Tensor::count() const {
  std::size_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  return count;
}

const void* const* table() {
  static const std::array<const void*, 512> slots = make_table();
  return slots.data();
}

Kernel::Kernel(const ort::CustomOp& op, Node& node)
    : op_(op),
      refused_(words_of(op.CreateKernelV2(&op, table(), reinterpret_cast<const KernelInfo*>(&node), &kernel_))) {}

Kernel::~Kernel() {
  if (kernel_ != nullptr) op_.KernelDestroy(kernel_);
}

std::string Kernel::run(Call& call) { return words_of(op_.KernelComputeV2(kernel_, reinterpret_cast<KernelContext*>(&call))); }

}  // namespace graphrot::fake
