#include "hadamard/op.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/isa.h"
#include "hadamard/hadamard.h"
#include "ort/glue.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::KernelContext;
using ort::KernelInfo;
using ort::Status;

constexpr ort::ElementType kTypes[kElementCount] = {ort::kFloat32, ort::kFloat16, ort::kBFloat16};
constexpr std::size_t kElementBytes[kElementCount] = {4, 2, 2};
constexpr std::size_t kWorkPerTask = 1 << 18;  // additions: some tens of microseconds
constexpr std::size_t kMostTasks = 64;
constexpr std::size_t kAlignment = 64;

// Scratch memory that threads take and give back; grows to the number of threads that run at once.
class ScratchPool {
 public:
  explicit ScratchPool(std::size_t floats) : floats_(floats) {}

  class Lease {
   public:
    explicit Lease(ScratchPool& pool) : pool_(pool), memory_(pool.take()) {}
    ~Lease() { pool_.give_back(std::move(memory_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    float* data() const {
      const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
      return reinterpret_cast<float*>((address + kAlignment - 1) / kAlignment * kAlignment);
    }

   private:
    ScratchPool& pool_;
    std::unique_ptr<float[]> memory_;
  };

 private:
  std::unique_ptr<float[]> take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        std::unique_ptr<float[]> memory = std::move(free_.back());
        free_.pop_back();
        return memory;
      }
      free_.reserve(++made_);  // so that give_back never allocates
    }
    return std::unique_ptr<float[]>(new float[floats_ + kAlignment / sizeof(float)]);
  }

  void give_back(std::unique_ptr<float[]> memory) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(memory));
  }

  std::size_t floats_;
  std::mutex mutex_;
  std::size_t made_ = 0;
  std::vector<std::unique_ptr<float[]>> free_;
};

HadamardTransform read_transform(const Api& api, const KernelInfo* info) {
  const ort::TensorAttribute factor = ort::attribute_tensor(api, info, "factor");
  if (factor.shape.size() != 2 || factor.shape[0] != factor.shape[1]) {
    throw std::invalid_argument("attribute 'factor' must be a square matrix");
  }
  return HadamardTransform(ort::attribute_int(api, info, "size"), factor.values, factor.shape[0],
                           ort::attribute_float(api, info, "scale"));
}

// `left` and `right` serve the function body alone. They are checked here because a node whose two forms
// disagree would answer differently from one machine to the next.
void check_body_attributes(const Api& api, const KernelInfo* info, const HadamardProblem& problem) {
  const std::int64_t width = std::int64_t{1} << problem.levels;
  std::int64_t orders[2] = {0, 0};
  const char* const names[2] = {"left", "right"};
  for (int side = 0; side < 2; ++side) {
    const ort::TensorAttribute matrix = ort::attribute_tensor(api, info, names[side]);
    bool good = matrix.shape.size() == 2 && matrix.shape[0] == matrix.shape[1];
    for (std::size_t i = 0; good && i < matrix.values.size(); ++i) {
      const auto order = static_cast<std::size_t>(matrix.shape[0]);
      bool odd = false;
      for (std::size_t common = (i / order) & (i % order); common != 0; common &= common - 1) odd = !odd;
      good = matrix.values[i] == (odd ? -1.0f : 1.0f);
    }
    if (!good) throw std::invalid_argument("attribute '" + std::string(names[side]) + "' must be a Sylvester matrix");
    orders[side] = matrix.shape[0];
  }
  const auto order = static_cast<std::int64_t>(problem.order);
  if (orders[0] * orders[1] != width ||
      ort::attribute_ints(api, info, "shape") != std::vector<std::int64_t>{-1, order, orders[0], orders[1]} ||
      ort::attribute_ints(api, info, "shape3") != std::vector<std::int64_t>{-1, order, width}) {
    throw std::invalid_argument("attributes 'left', 'right', 'shape', 'shape3' and 'size' do not fit together");
  }
}

class HadamardKernel {
 public:
  HadamardKernel(const Api& api, const KernelInfo* info, Element element)
      : api_(api),
        transform_(read_transform(api, info)),
        element_(element),
        run_(hadamard_kernels(selected_isa()).run[static_cast<int>(element)]),
        scratch_(transform_.scratch_floats()) {
    check_body_attributes(api, info, transform_.problem());
  }

  const Api& api() const { return api_; }

  void compute(KernelContext* context) {
    const ort::Value* input = nullptr;
    ort::check(api_, api_.call<ort::slot::KernelContext_GetInput>(static_cast<const KernelContext*>(context),
                                                                  std::size_t{0}, &input));
    const std::vector<std::int64_t> shape = ort::shape_of(api_, input, nullptr);
    const HadamardProblem& problem = transform_.problem();
    const auto size = static_cast<std::int64_t>(problem.size);
    if (shape.empty() || shape.back() % size != 0) {
      throw std::invalid_argument("the last axis of the input has " + (shape.empty() ? "no" : std::to_string(shape.back())) +
                                  " channels, which is no multiple of size " + std::to_string(size));
    }
    ort::Value* output = nullptr;
    ort::check(api_, api_.call<ort::slot::KernelContext_GetOutput>(context, std::size_t{0}, shape.data(), shape.size(),
                                                                   &output));
    std::size_t elements = 1;
    for (const std::int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
    const std::size_t blocks = elements / problem.size;
    if (blocks == 0) return;
    const auto* in = static_cast<const char*>(ort::data_of(api_, input));
    auto* out = static_cast<char*>(ort::mutable_data_of(api_, output));
    const std::size_t bytes = problem.size * kElementBytes[static_cast<int>(element_)];

    // Tasks hold whole groups of blocks, so that threads change neither the result nor the work.
    const std::size_t groups = (blocks + problem.group - 1) / problem.group;
    const std::size_t wanted = blocks * transform_.work_per_block() / kWorkPerTask;
    const std::size_t tasks = wanted < 1 ? 1 : (wanted > kMostTasks ? kMostTasks : wanted);
    const std::size_t step = (groups + tasks - 1) / tasks * problem.group;
    ort::parallel_for(api_, context, (blocks + step - 1) / step, [&](std::size_t task) {
      const std::size_t start = task * step;
      const std::size_t count = blocks - start < step ? blocks - start : step;
      const ScratchPool::Lease scratch(scratch_);
      run_(problem, in + start * bytes, out + start * bytes, count, scratch.data());
    });
  }

 private:
  Api api_;
  HadamardTransform transform_;
  Element element_;
  HadamardRun run_;
  ScratchPool scratch_;
};

const HadamardOp& self(const ort::CustomOp* op) { return *static_cast<const HadamardOp*>(op); }

Status* GRAPHROT_ORT_CALL create(const ort::CustomOp* op, const void* const* table, const KernelInfo* info, void** kernel) {
  const Api api(table);
  return ort::guarded(api, "graphrot::HadamardTransform", [&] {
    const std::string node = ort::node_name(api, info);
    try {
      *kernel = new HadamardKernel(api, info, self(op).element);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("node '" + node + "': " + error.what());
    }
  });
}

Status* GRAPHROT_ORT_CALL compute(void* kernel, KernelContext* context) {
  auto* own = static_cast<HadamardKernel*>(kernel);
  return ort::guarded(own->api(), "graphrot::HadamardTransform", [&] { own->compute(context); });
}

void GRAPHROT_ORT_CALL destroy(void* kernel) { delete static_cast<HadamardKernel*>(kernel); }

Status* GRAPHROT_ORT_CALL infer_shape(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  const Api& api = self(op).api;
  const ort::ShapeInferContext* seen = context;
  return ort::guarded(api, "graphrot::HadamardTransform", [&] {
    ort::TensorInfo* info = nullptr;  // stays the context's
    ort::check(api, api.call<ort::slot::ShapeInferContext_GetInputTypeShape>(seen, std::size_t{0}, &info));
    const ort::TensorInfo* shape = info;
    std::size_t rank = 0;
    ort::check(api, api.call<ort::slot::GetDimensionsCount>(shape, &rank));
    if (rank == 0) return;  // not even the rank is known: a scalar is no input of this operator
    std::vector<std::int64_t> sizes(rank);
    std::vector<const char*> names(rank);
    ort::check(api, api.call<ort::slot::GetDimensions>(shape, sizes.data(), rank));
    ort::check(api, api.call<ort::slot::GetSymbolicDimensions>(shape, names.data(), rank));
    // The runtime would write an unknown dimension without a name as the number -1. A fresh name claims nothing.
    static std::atomic<unsigned> unknown{0};
    std::vector<std::string> fresh(rank);
    for (std::size_t axis = 0; axis < rank; ++axis) {
      if (sizes[axis] >= 0 || (names[axis] != nullptr && *names[axis] != '\0')) continue;
      fresh[axis] = "graphrot_unknown_" + std::to_string(unknown++);
      names[axis] = fresh[axis].c_str();
    }
    ort::check(api, api.call<ort::slot::SetSymbolicDimensions>(info, names.data(), rank));
    ort::check(api, api.call<ort::slot::ShapeInferContext_SetOutputTypeShape>(
                        seen, std::size_t{0}, shape));
  });
}

std::size_t GRAPHROT_ORT_CALL may_be_in_place(int** input, int** output) {
  static int first = 0;
  *input = &first;
  *output = &first;
  return 1;
}

}  // namespace

HadamardOp::HadamardOp(const Api& api_table, Element element_type) : CustomOp{}, api(api_table), element(element_type) {
  version = ort::kApiVersion;
  GetName = [](const CustomOp*) { return HadamardOp::kName; };
  GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };  // CPU
  GetInputType = [](const CustomOp* op, std::size_t) { return kTypes[static_cast<int>(self(op).element)]; };
  GetInputTypeCount = [](const CustomOp*) { return std::size_t{1}; };
  GetOutputType = GetInputType;
  GetOutputTypeCount = GetInputTypeCount;
  GetInputCharacteristic = [](const CustomOp*, std::size_t) { return ort::kRequired; };
  GetOutputCharacteristic = GetInputCharacteristic;
  GetInputMemoryType = [](const CustomOp*, std::size_t) { return ort::kDefaultMemory; };
  CreateKernelV2 = create;
  KernelComputeV2 = compute;
  KernelDestroy = destroy;
  InferOutputShapeFn = infer_shape;
  GetStartVersion = [](const CustomOp*) { return 1; };
  GetEndVersion = [](const CustomOp*) { return 1; };
  GetMayInplace = may_be_in_place;
  ReleaseMayInplace = [](int*, int*) {};
}

}  // namespace graphrot
