#include "hadamard/op.h"

#include <cstddef>

#include "common/isa.h"
#include "common/scratch.h"
#include "hadamard/attributes.h"
#include "hadamard/call.h"
#include "hadamard/hadamard.h"
#include "ort/glue.h"
#include "ort/shapes.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::KernelContext;
using ort::KernelInfo;
using ort::Status;

constexpr std::size_t kElementBytes[kElementCount] = {4, 2, 2};
constexpr std::size_t kWorkPerTask = 1 << 18;  // additions: some tens of microseconds
constexpr std::size_t kMostTasks = 64;

class HadamardKernel {
 public:
  static constexpr const char* kWhere = "graphrot::HadamardTransform";

  HadamardKernel(const Api& api, const KernelInfo* info, Element element)
      : api_(api),
        transform_(read_transform(api, info)),
        element_(element),
        run_(hadamard_kernels(selected_isa()).run[static_cast<int>(element)]) {
    check_body_attributes(api, info, transform_.problem());
  }

  const Api& api() const { return api_; }

  void compute(KernelContext* context) {
    const HadamardProblem& problem = transform_.problem();
    const HadamardCall call = read_hadamard_call(api_, context, problem.size);
    const std::size_t blocks = call.blocks;
    if (blocks == 0) return;
    const auto* in = static_cast<const char*>(call.in);
    auto* out = static_cast<char*>(call.out);
    const std::size_t bytes = problem.size * kElementBytes[static_cast<int>(element_)];

    // Tasks hold whole groups of blocks, so that threads change neither the result nor the work.
    const std::size_t groups = (blocks + problem.group - 1) / problem.group;
    const std::size_t wanted = blocks * transform_.work_per_block() / kWorkPerTask;
    const std::size_t tasks = wanted < 1 ? 1 : (wanted > kMostTasks ? kMostTasks : wanted);
    const std::size_t step = (groups + tasks - 1) / tasks * problem.group;
    ort::parallel_for(api_, context, (blocks + step - 1) / step, [&](std::size_t task) {
      const std::size_t start = task * step;
      const std::size_t count = blocks - start < step ? blocks - start : step;
      const ScratchPool::Lease scratch(*scratch_, transform_.scratch_floats() * sizeof(float));
      run_(problem, in + start * bytes, out + start * bytes, count, static_cast<float*>(scratch.data()));
    });
  }

 private:
  Api api_;
  HadamardTransform transform_;
  Element element_;
  HadamardRun run_;
  ScratchPool::Shared scratch_;
};

Status* GRAPHROT_ORT_CALL infer_shape(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  const Api& api = ort::self(op).api;
  return ort::guarded(api, HadamardKernel::kWhere, [&] { ort::pass_shape_on(api, context); });
}

std::size_t GRAPHROT_ORT_CALL may_be_in_place(int** input, int** output) {
  static int first = 0;
  *input = &first;
  *output = &first;
  return 1;
}

}  // namespace

HadamardOp::HadamardOp(const Api& api_table, Element type) : ElementOp(api_table, type) {
  ort::fill<HadamardKernel>(this);
  GetName = [](const CustomOp*) { return HadamardOp::kName; };
  GetInputType = GetOutputType;
  GetInputTypeCount = GetOutputTypeCount;
  GetInputCharacteristic = GetOutputCharacteristic;
  InferOutputShapeFn = infer_shape;
  GetMayInplace = may_be_in_place;
  ReleaseMayInplace = [](int*, int*) {};
}

}  // namespace graphrot
