#include "attention/op_cuda.h"

#include <cstddef>
#include <memory>

#include "attention/attention_cuda.h"
#include "attention/node.h"
#include "hadamard/transform_cuda.h"
#include "ort/cuda_glue.h"
#include "ort/glue.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::KernelContext;
using ort::KernelInfo;

constexpr std::size_t kTotal = 6;  // input total_sequence_length, of which the cache's slots follow

class CudaRotatedAttentionKernel {
 public:
  static constexpr const char* kWhere = "graphrot::RotatedAttention";

  CudaRotatedAttentionKernel(const Api& api, const KernelInfo* info, Element element)
      : allocator_(api, info), element_(element), form_{} {
    ort::check_device();
    const AttentionNode node = read_attention_node(api, info);
    form_ = node.form;
    masked_ = node.masked;
    const HadamardProblem* const rotation = node.rotation != nullptr ? &node.rotation->problem() : nullptr;
    check_attention_cuda(form_, rotation != nullptr ? rotation->size : 0);
    if (rotation != nullptr) rotation_.reset(new CudaTransform(allocator_, info, *rotation));
  }

  const Api& api() const { return allocator_.api(); }

  void compute(KernelContext* context) {
    const AttentionCall call = read_attention_call(api(), context, form_, masked_, Tensors::kOnDevice);
    const ort::DeviceScratch scratch(allocator_, context, attention_cuda_scratch_bytes(form_, call));
    attention_cuda(form_, rotation_ != nullptr ? &rotation_->problem() : nullptr, element_, call, scratch.data(),
                   ort::stream_of(api(), context));
  }

 private:
  ort::DeviceAllocator allocator_;
  Element element_;
  AttentionForm form_;
  bool masked_ = false;
  std::unique_ptr<CudaTransform> rotation_;
};

}  // namespace

CudaRotatedAttentionOp::CudaRotatedAttentionOp(const Api& api_table, Element type)
    : RotatedAttentionOp(api_table, type) {
  ort::move_to_cuda<CudaRotatedAttentionKernel>(this);
  GetInputMemoryType = [](const CustomOp*, std::size_t index) {
    return index == kTotal ? ort::kHostMemory : ort::kDefaultMemory;
  };
}

}  // namespace graphrot
