#include "matmul/op.h"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/isa.h"
#include "common/scratch.h"
#include "matmul/fused.h"
#include "matmul/node.h"
#include "ort/glue.h"
#include "ort/shapes.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::KernelContext;
using ort::KernelInfo;
using ort::Status;

constexpr const char* kWhere = "graphrot::RotatedMatMul";
constexpr ort::ElementType kTypes[kElementCount] = {ort::kFloat32, ort::kFloat16, ort::kBFloat16};

// inputs: X, B, scales, zero_points, bias
constexpr std::size_t kInputs = 5, kRequiredInputs = 3;

class RotatedMatMulKernel {
 public:
  RotatedMatMulKernel(const Api& api, const KernelInfo* info, Element element)
      : RotatedMatMulKernel(api, read_matmul_node(api, info), element) {}

  const Api& api() const { return api_; }

  void compute(KernelContext* context) {
    const ort::Value* input = nullptr;
    ort::check(api_, api_.call<ort::slot::KernelContext_GetInput>(static_cast<const KernelContext*>(context),
                                                                  std::size_t{0}, &input));
    std::vector<std::int64_t> shape = ort::shape_of(api_, input, nullptr);
    const auto channels = static_cast<std::int64_t>(product_.channels());
    if (shape.empty() || shape.back() != channels) {
      throw std::invalid_argument("the last axis of the input has " + (shape.empty() ? "no" : std::to_string(shape.back())) +
                                  " channels, and K is " + std::to_string(channels));
    }
    shape.back() = static_cast<std::int64_t>(product_.columns());
    std::size_t rows = 1;
    for (std::size_t axis = 0; axis + 1 < shape.size(); ++axis) rows *= static_cast<std::size_t>(shape[axis]);
    ort::Value* output = nullptr;
    const std::int64_t* dims = shape.data();
    ort::check(api_, api_.call<ort::slot::KernelContext_GetOutput>(context, std::size_t{0}, dims, shape.size(), &output));
    if (rows == 0) return;
    product_.run(ort::data_of(api_, input), rows, ort::mutable_data_of(api_, output), *scratch_,
                 [&](std::size_t count, const auto& task) { ort::parallel_for(api_, context, count, task); });
  }

 private:
  RotatedMatMulKernel(const Api& api, MatMulNode node, Element element)
      : api_(api),
        product_(node.weights, std::move(node.rotation), node.levels, element, selected_isa()) {}

  Api api_;
  FusedMatMul product_;
  ScratchPool::Shared scratch_;
};

const RotatedMatMulOp& self(const ort::CustomOp* op) { return *static_cast<const RotatedMatMulOp*>(op); }

Status* GRAPHROT_ORT_CALL create(const ort::CustomOp* op, const void* const* table, const KernelInfo* info, void** kernel) {
  const Api api(table);
  return ort::guarded(api, kWhere, [&] {
    const std::string node = ort::node_name(api, info);
    try {
      *kernel = new RotatedMatMulKernel(api, info, self(op).element);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("node '" + node + "': " + error.what());
    }
  });
}

Status* GRAPHROT_ORT_CALL compute(void* kernel, KernelContext* context) {
  auto* own = static_cast<RotatedMatMulKernel*>(kernel);
  return ort::guarded(own->api(), kWhere, [&] { own->compute(context); });
}

Status* GRAPHROT_ORT_CALL infer_shape(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  const Api& api = self(op).api;
  return ort::guarded(api, kWhere, [&] { ort::pass_shape_on_with_last(api, context, "N"); });
}

ort::ElementType GRAPHROT_ORT_CALL input_type(const ort::CustomOp* op, std::size_t index) {
  switch (index) {
    case 0: return kTypes[static_cast<int>(self(op).element)];
    case 2: return ort::kUndefined;  // float or float16; the kernel looks
    case 4: return ort::kFloat32;
    default: return ort::kUint8;
  }
}

}  // namespace

RotatedMatMulOp::RotatedMatMulOp(const Api& api_table, Element element_type)
    : CustomOp{}, api(api_table), element(element_type) {
  version = ort::kApiVersion;
  GetName = [](const CustomOp*) { return RotatedMatMulOp::kName; };
  GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };  // CPU
  GetInputType = input_type;
  GetInputTypeCount = [](const CustomOp*) { return kInputs; };
  GetOutputType = [](const CustomOp* op, std::size_t) { return kTypes[static_cast<int>(self(op).element)]; };
  GetOutputTypeCount = [](const CustomOp*) { return std::size_t{1}; };
  GetInputCharacteristic = [](const CustomOp*, std::size_t index) {
    return index < kRequiredInputs ? ort::kRequired : ort::kOptional;
  };
  GetOutputCharacteristic = [](const CustomOp*, std::size_t) { return ort::kRequired; };
  GetInputMemoryType = [](const CustomOp*, std::size_t) { return ort::kDefaultMemory; };
  CreateKernelV2 = create;
  KernelComputeV2 = compute;
  KernelDestroy = [](void* kernel) { delete static_cast<RotatedMatMulKernel*>(kernel); };
  InferOutputShapeFn = infer_shape;
  GetStartVersion = [](const CustomOp*) { return 1; };
  GetEndVersion = [](const CustomOp*) { return 1; };
}

}  // namespace graphrot
