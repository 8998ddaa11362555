// Rotate, quantize, multiply: the whole operator without a runtime. Per panel of rows, the rotated activations exist
// as int8 codes; floats of a row exist in the working memory of one task, and the weights never as floats.
#pragma once

#include <cstddef>
#include <memory>

#include "common/element.h"
#include "common/isa.h"
#include "common/scratch.h"
#include "hadamard/hadamard.h"
#include "matmul/product.h"
#include "matmul/rows.h"
#include "matmul/weights.h"

namespace graphrot {

class FusedMatMul {
 public:
  // `rotation` is null for none. Throws std::invalid_argument, in words for people, when the numbers do not fit.
  FusedMatMul(const WeightSource& source, std::unique_ptr<HadamardTransform> rotation, int levels, Element element, Isa isa);

  std::size_t channels() const { return rows_.channels; }
  std::size_t columns() const { return weights_.problem().columns; }

  // `in` [rows, K] to `out` [rows, N], both of the element type. `parallel(count, task)` runs task(0) ...
  // task(count - 1), at once or not; how many threads it has changes neither results nor working memory.
  template <class Parallel>
  void run(const void* in, std::size_t rows, void* out, ScratchPool& pool, const Parallel& parallel) const {
    if (rows == 0) return;
    const std::size_t step = panel_rows(rows);
    const ScratchPool::Lease memory(pool, panel_bytes(step));
    const QuantizedRows whole = panel(memory.data(), step);
    for (std::size_t first = 0; first < rows; first += step) {
      const std::size_t count = rows - first < step ? rows - first : step;
      const std::size_t chunk = quantize_chunk(count);
      parallel((count + chunk - 1) / chunk, [&](std::size_t task) {
        quantize(in, first, whole, task * chunk, count - task * chunk < chunk ? count - task * chunk : chunk, pool);
      });
      const Cut cut = cut_product(count);
      parallel(cut.tasks(), [&](std::size_t task) { multiply(whole, first, count, cut, task, out, pool); });
    }
  }

 private:
  // How the product of a panel is shared out: runs of tiles by runs of rows.
  struct Cut {
    std::size_t tile_step, tile_runs, row_step, row_runs;
    std::size_t tasks() const { return tile_runs * row_runs; }
  };

  static std::size_t panel_rows(std::size_t rows);
  std::size_t panel_bytes(std::size_t rows) const;
  QuantizedRows panel(void* memory, std::size_t rows) const;
  std::size_t quantize_chunk(std::size_t count) const;
  Cut cut_product(std::size_t count) const;
  void quantize(const void* in, std::size_t first, const QuantizedRows& panel, std::size_t row, std::size_t count,
                ScratchPool& pool) const;
  void multiply(const QuantizedRows& panel, std::size_t first, std::size_t count, const Cut& cut, std::size_t task,
                void* out, ScratchPool& pool) const;

  std::unique_ptr<HadamardTransform> rotation_;
  ProductWeights weights_;
  RowsProblem rows_;
  std::size_t element_bytes_;
  RowsRun quantize_;
  ProductRun multiply_;
};

}  // namespace graphrot
