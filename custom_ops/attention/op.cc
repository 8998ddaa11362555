#include "attention/op.h"

#include <utility>

#include "attention/attention.h"
#include "attention/node.h"
#include "common/isa.h"
#include "common/scratch.h"
#include "ort/glue.h"
#include "ort/shapes.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::KernelContext;
using ort::KernelInfo;
using ort::Status;

// inputs: query, key, value, past_key, past_value, seqlens_k, total_sequence_length, mask
constexpr std::size_t kInputs = 8, kRequiredInputs = 7, kOutputs = 3;
constexpr std::size_t kPasts[] = {3, 4}, kPresents[] = {1, 2}, kSlotsAxis = 2;

class RotatedAttentionKernel {
 public:
  static constexpr const char* kWhere = "graphrot::RotatedAttention";

  RotatedAttentionKernel(const Api& api, const KernelInfo* info, Element element)
      : RotatedAttentionKernel(api, read_attention_node(api, info), element) {}

  const Api& api() const { return api_; }

  void compute(KernelContext* context) {
    const AttentionCall call = read_attention_call(api_, context, attention_.form(), masked_, Tensors::kHere);
    attention_.run(call, *scratch_,
                   [&](std::size_t count, const auto& task) { ort::parallel_for(api_, context, count, task); });
  }

 private:
  RotatedAttentionKernel(const Api& api, AttentionNode node, Element element)
      : api_(api), attention_(node.form, std::move(node.rotation), element, selected_isa()), masked_(node.masked) {}

  Api api_;
  Attention attention_;
  bool masked_;
  ScratchPool::Shared scratch_;
};

Status* GRAPHROT_ORT_CALL infer_shape(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  const Api& api = ort::self(op).api;
  return ort::guarded(api, RotatedAttentionKernel::kWhere, [&] {
    ort::pass_shape_on(api, context);
    for (std::size_t i = 0; i < 2; ++i) ort::pass_shape_on_but(api, context, kPasts[i], kPresents[i], kSlotsAxis);
  });
}

ort::ElementType GRAPHROT_ORT_CALL input_type(const ort::CustomOp* op, std::size_t index) {
  switch (index) {
    case 0: case 1: case 2: return ort::element_type(op);
    case 5: case 6: return ort::kInt32;
    case 7: return ort::kFloat32;
    default: return ort::kUint8;
  }
}

}  // namespace

RotatedAttentionOp::RotatedAttentionOp(const Api& api_table, Element type) : ElementOp(api_table, type) {
  ort::fill<RotatedAttentionKernel>(this);
  GetName = [](const CustomOp*) { return RotatedAttentionOp::kName; };
  GetInputType = input_type;
  ort::take_inputs<kInputs, kRequiredInputs>(this);
  GetOutputType = [](const CustomOp* made, std::size_t index) {
    return index == 0 ? ort::element_type(made) : ort::kUint8;
  };
  GetOutputTypeCount = [](const CustomOp*) { return kOutputs; };
  InferOutputShapeFn = infer_shape;
}

}  // namespace graphrot
