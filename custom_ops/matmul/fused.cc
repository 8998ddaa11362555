#include "matmul/fused.h"

#include <cstdint>
#include <utility>

namespace graphrot {
namespace {

constexpr std::size_t kPanelRows = 256;              // rows that exist as codes at once
constexpr std::size_t kQuantizeWork = 1 << 16;       // channels of one task
constexpr std::size_t kProductWork = 1 << 20;        // multiply-adds of one task: some tens of microseconds
constexpr std::size_t kLeastRows = 48;               // of one task: below, unpacking the weights again costs too much
constexpr std::size_t kEnoughTasks = 16;
constexpr std::size_t kAlignment = ScratchPool::kAlignment;

std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }
std::size_t aligned(std::size_t bytes) { return divide_up(bytes, kAlignment) * kAlignment; }
std::size_t at_least_one(std::size_t value) { return value < 1 ? 1 : value; }

}  // namespace

FusedMatMul::FusedMatMul(const WeightSource& source, std::unique_ptr<HadamardTransform> rotation, int levels,
                         Element element, Isa isa)
    : rotation_(std::move(rotation)),
      weights_(source),
      rows_{rotation_ != nullptr ? &rotation_->problem() : nullptr, source.channels, source.group, levels},
      element_bytes_(element == Element::kFloat ? 4 : 2),
      quantize_(rows_kernels(isa).run[static_cast<int>(element)]),
      multiply_(product_kernels(isa).run[static_cast<int>(element)]) {
  check_rows(rows_);
}

// Panels of nearly equal size: a last one of few rows would read all weights for little.
std::size_t FusedMatMul::panel_rows(std::size_t rows) { return divide_up(rows, divide_up(rows, kPanelRows)); }

std::size_t FusedMatMul::panel_bytes(std::size_t rows) const {
  const std::size_t groups = weights_.problem().groups;
  return rows * rows_stride(rows_.channels) + aligned(rows * sizeof(float)) + rows * groups * sizeof(std::int32_t);
}

QuantizedRows FusedMatMul::panel(void* memory, std::size_t rows) const {
  const std::size_t stride = rows_stride(rows_.channels);
  auto* bytes = static_cast<unsigned char*>(memory);
  auto* scales = bytes + rows * stride;
  return {reinterpret_cast<std::int8_t*>(bytes), stride, reinterpret_cast<float*>(scales),
          reinterpret_cast<std::int32_t*>(scales + aligned(rows * sizeof(float)))};
}

std::size_t FusedMatMul::quantize_chunk(std::size_t count) const {
  const std::size_t chunk = at_least_one(kQuantizeWork / rows_.channels);
  return chunk < count ? chunk : count;
}

FusedMatMul::Cut FusedMatMul::cut_product(std::size_t count) const {
  const ProductProblem& weights = weights_.problem();
  const std::size_t per_tile = kTileColumns * rows_.channels * count;
  std::size_t wanted = divide_up(kProductWork, per_tile);
  // Few rows are as fast as the weights are read, and that is from several tiles at once.
  if (count < kTilesTogether) wanted = divide_up(wanted, kTilesTogether) * kTilesTogether;
  Cut cut{};
  cut.tile_step = wanted < weights.tiles ? wanted : weights.tiles;
  cut.tile_runs = divide_up(weights.tiles, cut.tile_step);
  const std::size_t runs = divide_up(kEnoughTasks, cut.tile_runs), most = at_least_one(count / kLeastRows);
  cut.row_step = divide_up(count, runs < most ? runs : most);
  cut.row_runs = divide_up(count, cut.row_step);
  return cut;
}

void FusedMatMul::quantize(const void* in, std::size_t first, const QuantizedRows& panel, std::size_t row,
                           std::size_t count, ScratchPool& pool) const {
  const ScratchPool::Lease scratch(pool, rows_scratch_floats(rows_) * sizeof(float));
  const QuantizedRows part{panel.codes + row * panel.stride, panel.stride, panel.scales + row,
                           panel.sums + row * weights_.problem().groups};
  const auto* from = static_cast<const unsigned char*>(in) + (first + row) * rows_.channels * element_bytes_;
  quantize_(rows_, from, count, part, static_cast<float*>(scratch.data()));
}

void FusedMatMul::multiply(const QuantizedRows& panel, std::size_t first, std::size_t count, const Cut& cut,
                           std::size_t task, void* out, ScratchPool& pool) const {
  const ProductProblem& weights = weights_.problem();
  const std::size_t tile = task % cut.tile_runs * cut.tile_step, row = task / cut.tile_runs * cut.row_step;
  const std::size_t last = weights.tiles - tile < cut.tile_step ? weights.tiles : tile + cut.tile_step;
  const std::size_t rows = count - row < cut.row_step ? count - row : cut.row_step;
  const ScratchPool::Lease scratch(pool, product_scratch_bytes(weights, rows));
  const QuantizedRows part{panel.codes + row * panel.stride, panel.stride, panel.scales + row,
                           panel.sums + row * weights.groups};
  auto* to = static_cast<unsigned char*>(out) + (first + row) * weights.columns * element_bytes_;
  multiply_(weights, part, rows, tile, last, to, weights.columns, scratch.data());
}

}  // namespace graphrot
