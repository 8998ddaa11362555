#include "matmul/op.h"

#include <utility>

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

// inputs: X, B, scales, zero_points, bias
constexpr std::size_t kInputs = 5, kRequiredInputs = 3;

class RotatedMatMulKernel {
 public:
  static constexpr const char* kWhere = "graphrot::RotatedMatMul";

  RotatedMatMulKernel(const Api& api, const KernelInfo* info, Element element)
      : RotatedMatMulKernel(api, read_matmul_node(api, info), element) {}

  const Api& api() const { return api_; }

  void compute(KernelContext* context) {
    const MatMulCall call = read_matmul_call(api_, context, product_.channels(), product_.columns());
    if (call.rows == 0) return;
    product_.run(call.in, call.rows, call.out, *scratch_,
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

Status* GRAPHROT_ORT_CALL infer_shape(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  const Api& api = ort::self(op).api;
  return ort::guarded(api, RotatedMatMulKernel::kWhere, [&] { ort::pass_shape_on_with_last(api, context, "N"); });
}

ort::ElementType GRAPHROT_ORT_CALL input_type(const ort::CustomOp* op, std::size_t index) {
  switch (index) {
    case 0: return ort::element_type(op);
    case 2: return ort::kUndefined;  // float or float16; the kernel looks
    case 4: return ort::kFloat32;
    default: return ort::kUint8;
  }
}

}  // namespace

RotatedMatMulOp::RotatedMatMulOp(const Api& api_table, Element type) : ElementOp(api_table, type) {
  ort::fill<RotatedMatMulKernel>(this);
  GetName = [](const CustomOp*) { return RotatedMatMulOp::kName; };
  GetInputType = input_type;
  ort::take_inputs<kInputs, kRequiredInputs>(this);
  InferOutputShapeFn = infer_shape;
}

}  // namespace graphrot
