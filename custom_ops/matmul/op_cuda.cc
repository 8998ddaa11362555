#include "matmul/op_cuda.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hadamard/transform_cuda.h"
#include "matmul/node.h"
#include "matmul/product_cuda.h"
#include "matmul/rows.h"
#include "matmul/rows_cuda.h"
#include "ort/cuda_glue.h"
#include "ort/glue.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::DeviceScratch;
using ort::KernelContext;
using ort::KernelInfo;

constexpr std::size_t kElementBytes[kElementCount] = {4, 2, 2};
// Codes that exist at once: prefills of tens of thousands of rows go in panels of some thousands.
constexpr std::size_t kPanelBytes = std::size_t{1} << 27;
constexpr std::size_t kPanelStep = 256;

constexpr std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }

class CudaRotatedMatMulKernel {
 public:
  static constexpr const char* kWhere = "graphrot::RotatedMatMul";

  CudaRotatedMatMulKernel(const Api& api, const KernelInfo* info, Element element)
      : allocator_(api, info), element_(element), product_{}, rows_{} {
    ort::check_device();
    const MatMulForm form = read_matmul_form(api, info);
    const WeightSource& weights = form.weights;
    const HadamardProblem* const rotation = form.rotation != nullptr ? &form.rotation->problem() : nullptr;
    check_rows({rotation, weights.channels, weights.group, form.levels});
    product_.channels = weights.channels;
    product_.columns = weights.columns;
    product_.group = weights.group;
    product_.groups = divide_up(weights.channels, weights.group);
    product_.block = weights.block;
    product_.bits = weights.bits;
    product_.zero = 1 << (weights.bits - 1);
    product_.codes = weights.codes;
    product_.scales = form.scales;
    product_.half_scales = form.half_scales;
    product_.bias = weights.bias;
    const CudaDevice device = current_device();
    check_cuda_product(product_, device);
    product_.zeros = zeros_that_tell(weights);
    if (rotation != nullptr) rotation_.reset(new CudaTransform(allocator_, info, *rotation));
    rows_.rotation = rotation_ != nullptr ? &rotation_->problem() : nullptr;
    rows_.channels = weights.channels;
    rows_.group = weights.group;
    rows_.levels = form.levels;
    rows_.interleaved = weights.bits == 4;
    check_cuda_rows(rows_, device);
  }

  const Api& api() const { return allocator_.api(); }

  void compute(KernelContext* context) {
    const MatMulCall call = read_matmul_call(api(), context, product_.channels, product_.columns);
    if (call.rows == 0) return;
    const std::size_t step = panel_rows(call.rows), product_bytes = product_cuda_scratch_bytes(product_, step);
    const std::size_t stride = rows_stride(product_.channels);
    const std::size_t codes = DeviceScratch::aligned(step * stride);
    const std::size_t scales = DeviceScratch::aligned(step * sizeof(float));
    const std::size_t sums = DeviceScratch::aligned(step * product_.groups * sizeof(std::int32_t));
    const DeviceScratch scratch(allocator_, context, codes + scales + sums + product_bytes);
    auto* const bytes = static_cast<unsigned char*>(scratch.data());
    const CudaRows panel{reinterpret_cast<std::int8_t*>(bytes), stride, reinterpret_cast<float*>(bytes + codes),
                         reinterpret_cast<std::int32_t*>(bytes + codes + scales)};
    void* const rest = bytes + codes + scales + sums;
    CudaStream const stream = ort::stream_of(api(), context);
    const std::size_t element = kElementBytes[static_cast<int>(element_)];
    const auto* in = static_cast<const unsigned char*>(call.in);
    auto* out = static_cast<unsigned char*>(call.out);
    for (std::size_t first = 0; first < call.rows; first += step) {
      const std::size_t count = call.rows - first < step ? call.rows - first : step;
      rows_cuda(rows_, element_, in + first * product_.channels * element, count, panel, stream);
      product_cuda(product_, panel, element_, count, out + first * product_.columns * element, rest, stream);
    }
  }

 private:
  // Zero points are looked at once, here.
  static const std::uint8_t* zeros_that_tell(const WeightSource& weights) {
    if (weights.zeros == nullptr) return nullptr;
    std::vector<std::uint8_t> here(zeros_bytes(weights));
    copy_to_host(here.data(), weights.zeros, here.size());
    WeightSource copy = weights;
    copy.zeros = here.data();
    return telling_zeros(copy) != nullptr ? weights.zeros : nullptr;
  }

  std::size_t panel_rows(std::size_t rows) const {
    const std::size_t most = kPanelBytes / rows_stride(product_.channels) / kPanelStep * kPanelStep;
    const std::size_t step = most < kPanelStep ? kPanelStep : most;
    return rows < step ? rows : step;
  }

  ort::DeviceAllocator allocator_;
  Element element_;
  std::unique_ptr<CudaTransform> rotation_;
  CudaProduct product_;
  CudaRowsProblem rows_;
};

}  // namespace

CudaRotatedMatMulOp::CudaRotatedMatMulOp(const Api& api_table, Element type) : RotatedMatMulOp(api_table, type) {
  ort::move_to_cuda<CudaRotatedMatMulKernel>(this);
}

}  // namespace graphrot
