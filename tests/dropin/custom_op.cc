// An operator of somebody else's: acme.ops::Softsign(x) = x / (1 + |x|), float32, any shape.
#include <cmath>
#include <cstdint>
#include <vector>

#include "ort/abi.h"

namespace {

using namespace graphrot::ort;

struct Kernel {
  Api api;
};

Status* create(const CustomOp*, const void* const* table, const KernelInfo*, void** kernel) {
  *kernel = new Kernel{Api(table)};
  return nullptr;
}

Status* compute(void* raw, KernelContext* context) {
  const Api& api = static_cast<Kernel*>(raw)->api;
  const Value* x = nullptr;
  if (Status* status = api.call<slot::KernelContext_GetInput>(static_cast<const KernelContext*>(context), std::size_t{0}, &x))
    return status;
  TensorInfo* info = nullptr;
  if (Status* status = api.call<slot::GetTensorTypeAndShape>(x, &info)) return status;
  std::size_t rank = 0;
  api.call<slot::GetDimensionsCount>(static_cast<const TensorInfo*>(info), &rank);
  std::vector<std::int64_t> dims(rank);
  api.call<slot::GetDimensions>(static_cast<const TensorInfo*>(info), dims.data(), rank);
  api.call<slot::ReleaseTensorTypeAndShapeInfo>(info);
  std::size_t count = 1;
  for (const std::int64_t dim : dims) count *= static_cast<std::size_t>(dim);
  Value* y = nullptr;
  const std::int64_t* shape = dims.data();
  if (Status* status = api.call<slot::KernelContext_GetOutput>(context, std::size_t{0}, shape, rank, &y)) return status;
  void* from = nullptr;
  void* to = nullptr;
  api.call<slot::GetTensorMutableData>(const_cast<Value*>(x), &from);
  api.call<slot::GetTensorMutableData>(y, &to);
  for (std::size_t i = 0; i < count; ++i) {
    const float value = static_cast<const float*>(from)[i];
    static_cast<float*>(to)[i] = value / (1 + std::fabs(value));
  }
  return nullptr;
}

CustomOp make() {
  CustomOp op{};
  op.version = kApiVersion;
  op.GetName = [](const CustomOp*) { return "Softsign"; };
  op.GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const CustomOp*, std::size_t) { return kFloat32; };
  op.GetInputTypeCount = [](const CustomOp*) -> std::size_t { return 1; };
  op.GetOutputType = [](const CustomOp*, std::size_t) { return kFloat32; };
  op.GetOutputTypeCount = [](const CustomOp*) -> std::size_t { return 1; };
  op.GetInputCharacteristic = [](const CustomOp*, std::size_t) { return kRequired; };
  op.GetOutputCharacteristic = [](const CustomOp*, std::size_t) { return kRequired; };
  op.GetInputMemoryType = [](const CustomOp*, std::size_t) { return kDefaultMemory; };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.GetStartVersion = [](const CustomOp*) { return 1; };
  op.GetEndVersion = [](const CustomOp*) { return 1; };
  return op;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Status* RegisterCustomOps(SessionOptions* options, const ApiBase* base) {
  static const CustomOp op = make();
  static Api api(base->GetApi(kApiVersion));
  static CustomOpDomain* domain = nullptr;
  if (domain == nullptr) {
    if (Status* status = api.call<slot::CreateCustomOpDomain>("acme.ops", &domain)) return status;
    if (Status* status = api.call<slot::CustomOpDomain_Add>(domain, &op)) return status;
  }
  return api.call<slot::AddCustomOpDomain>(options, domain);
}
