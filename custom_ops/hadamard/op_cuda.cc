#include "hadamard/op_cuda.h"

#include "hadamard/attributes.h"
#include "hadamard/call.h"
#include "hadamard/cuda.h"
#include "hadamard/transform_cuda.h"
#include "ort/cuda_glue.h"
#include "ort/glue.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::KernelContext;
using ort::KernelInfo;

class CudaHadamardKernel {
 public:
  static constexpr const char* kWhere = "graphrot::HadamardTransform";

  CudaHadamardKernel(const Api& api, const KernelInfo* info, Element element)
      : allocator_(api, info), transform_(made(allocator_, info)), element_(element) {}

  const Api& api() const { return allocator_.api(); }

  void compute(KernelContext* context) {
    const HadamardCall call = read_hadamard_call(api(), context, transform_.problem().size);
    if (call.blocks == 0) return;
    hadamard_cuda(transform_.problem(), element_, call.in, call.out, call.blocks, ort::stream_of(api(), context));
  }

 private:
  static CudaTransform made(const ort::DeviceAllocator& allocator, const KernelInfo* info) {
    ort::check_device();
    const HadamardTransform transform = read_transform(allocator.api(), info);
    check_body_attributes(allocator.api(), info, transform.problem());
    return CudaTransform(allocator, info, transform.problem());
  }

  ort::DeviceAllocator allocator_;
  CudaTransform transform_;
  Element element_;
};

}  // namespace

CudaHadamardOp::CudaHadamardOp(const Api& api_table, Element type) : HadamardOp(api_table, type) {
  ort::move_to_cuda<CudaHadamardKernel>(this);
}

}  // namespace graphrot
