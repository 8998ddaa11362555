// A tile of outputs: its sizes, where things lie in shared memory, and how they come there, stage by stage.
#pragma once

#include "matmul/product_parts.cuh"

namespace graphrot::cuda {

// Rows and columns of a block and of a warp; stages; least blocks on a multiprocessor, which bounds the registers.
template <int Bits, bool Grouped, unsigned Rows, unsigned Columns, unsigned WarpRows, unsigned WarpColumns,
          unsigned Stages, unsigned Blocks>
struct Tile {
  static constexpr int kBits = Bits;
  static constexpr bool kGrouped = Grouped;
  static constexpr unsigned kRows = Rows, kColumns = Columns, kWarpRows = WarpRows, kWarpColumns = WarpColumns;
  static constexpr unsigned kStages = Stages, kBlocks = Blocks;
  static constexpr unsigned kDown = WarpRows / 16, kAcross = WarpColumns / 8;  // mmas of a warp
  static constexpr unsigned kThreads = kWarp * (Rows / WarpRows) * (Columns / WarpColumns);

  static constexpr unsigned kSteps = Bits == 4 ? 4 : 2;  // of 32 channels in a stage
  static constexpr unsigned kStepShift = Bits == 4 ? 2 : 1;
  static constexpr unsigned kRowBytes = 32 * kSteps, kColumnBytes = 64;  // in a stage
  static constexpr unsigned kColumnsAt = Rows * kRowBytes;               // in a stage, behind the rows
  static constexpr unsigned kStageBytes = kColumnsAt + Columns * kColumnBytes;
  static constexpr unsigned kRowCopies = Rows * kRowBytes / 16 / kThreads;  // of 16 bytes, by each thread
  static constexpr unsigned kColumnCopies = Columns * kColumnBytes / 16 / kThreads;
  static_assert(kRowCopies * 16 * kThreads == Rows * kRowBytes && kColumnCopies * kThreads == Columns * 4, "even");

  // What the groups of this stage and of the next one need: pitches are 8 words over a multiple of 32, so that writes
  // of several groups of a column go to different banks.
  static constexpr unsigned kSlots = Grouped ? 2 * kSteps : 1;
  static constexpr unsigned kColumnPitch = Grouped ? Columns + 8 : Columns, kRowPitch = Rows + 8;
  static constexpr unsigned kBias = Stages * kStageBytes, kScales = kBias + 4 * Columns;
  static constexpr unsigned kZeros = kScales + 4 * kSlots * kColumnPitch;
  static constexpr unsigned kSums = kZeros + 4 * kSlots * kColumnPitch;
  static constexpr unsigned kSharedBytes = kSums + (Grouped ? 4 * kSlots * kRowPitch : 0);
  static_assert(kSharedBytes <= 101376, "what every device from sm_80 on has for a block");
  static constexpr unsigned kScaleLoads = (Columns * kSteps + kThreads - 1) / kThreads;  // by each thread, at most
  static constexpr unsigned kSumLoads = (Rows * kSteps + kThreads - 1) / kThreads;
};

// What this thread copies, stage after stage, 16 bytes at a time: the same piece of several rows and columns.
template <class C>
class TileCopies {
 public:
  GRAPHROT_DEVICE TileCopies(const ProductArguments& p, unsigned first_row, unsigned first_column) {
    constexpr unsigned kRowPieces = C::kRowBytes / 16, kColumnPieces = C::kColumnBytes / 16;
    const unsigned t = threadIdx.x, rows = p.rows - first_row, columns = p.columns - first_column;
    row_byte_ = t % kRowPieces * 16;
    row_to_ = place<C::kRowBytes>(t / kRowPieces, row_byte_);
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < C::kRowCopies; ++i) {
      const unsigned row = t / kRowPieces + i * (C::kThreads / kRowPieces);
      if (row < rows) valid_rows_ |= 1u << i;
      rows_[i] = p.codes + (first_row + (row < rows ? row : 0)) * p.stride + row_byte_;
    }
    column_byte_ = t % kColumnPieces * 16;
    column_to_ = C::kColumnsAt + place<C::kColumnBytes>(t / kColumnPieces, column_byte_);
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < C::kColumnCopies; ++i) {
      const unsigned column = t / kColumnPieces + i * (C::kThreads / kColumnPieces);
      if (column < columns) valid_columns_ |= 1u << i;
      const std::size_t from = first_column + (column < columns ? column : 0);
      columns_[i] = p.weights + from * p.column_bytes + column_byte_;
    }
  }

  // Begins to copy the next stage to a slot of shared memory; zeros behind the ends.
  GRAPHROT_DEVICE void next(const ProductArguments& p, Shared<std::uint8_t> memory, unsigned slot) {
    const unsigned to = slot * C::kStageBytes;
    const unsigned rows = row_byte_ < p.code_bytes ? valid_rows_ : 0;
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < C::kRowCopies; ++i) {
      constexpr unsigned kApart = C::kThreads / (C::kRowBytes / 16) * C::kRowBytes;
      cp_async16(memory.at(to + row_to_ + i * kApart), rows_[i], (rows >> i & 1) != 0);
      rows_[i] += C::kRowBytes;
    }
    const unsigned columns = column_byte_ < p.column_bytes ? valid_columns_ : 0;
    constexpr unsigned kApart = C::kThreads / (C::kColumnBytes / 16) * C::kColumnBytes;
    if (p.aligned) {
      GRAPHROT_UNROLL
      for (unsigned i = 0; i < C::kColumnCopies; ++i) {
        cp_async16(memory.at(to + column_to_ + i * kApart), columns_[i], (columns >> i & 1) != 0);
      }
    } else {
      const bool second = column_byte_ + 8 < p.column_bytes;
      GRAPHROT_UNROLL
      for (unsigned i = 0; i < C::kColumnCopies; ++i) {
        const bool valid = (columns >> i & 1) != 0;
        copy_eights(memory, to + column_to_ + i * kApart, columns_[i], valid, valid && second);
      }
    }
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < C::kColumnCopies; ++i) columns_[i] += C::kColumnBytes;
    row_byte_ += C::kRowBytes;
    column_byte_ += C::kColumnBytes;
  }

 private:
  const std::int8_t* rows_[C::kRowCopies];
  const std::uint8_t* columns_[C::kColumnCopies];
  unsigned row_byte_, row_to_, column_byte_, column_to_;  // bytes: of the next stage
  unsigned valid_rows_ = 0, valid_columns_ = 0;           // a bit for each copy
};

// Scales, zero points and sums of codes of a stage's groups: loaded to registers before the stage in front of it is
// multiplied, which hides that they are strewn over memory, and put to shared memory after.
template <class C>
class TileGroups {
 public:
  GRAPHROT_DEVICE TileGroups(const ProductArguments& p, unsigned first_row, unsigned first_column)
      : first_row_(first_row), first_column_(first_column) {
    shift_ = C::kStepShift > p.group_shift ? C::kStepShift - p.group_shift : 0;
  }

  GRAPHROT_DEVICE void load(const ProductArguments& p, unsigned stage) {
    first_group_ = stage * C::kSteps >> p.group_shift;
    begins_ = first_group_ << p.group_shift == stage * C::kSteps;  // else it goes on from the stage before
    if (!begins_) return;
    const unsigned many = 1u << shift_;
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < C::kScaleLoads; ++i) {
      const unsigned entry = threadIdx.x + i * C::kThreads, group = first_group_ + (entry & (many - 1));
      const unsigned column = first_column_ + (entry >> shift_);
      const bool valid = entry >> shift_ < C::kColumns && group < p.groups && column < p.columns;
      scales_[i] = valid ? load_scale(p, column, group) : 0.0f;
      zeros_[i] = valid && p.zeros != nullptr ? load_zero<C::kBits>(p, column, group) : 0;
    }
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < C::kSumLoads; ++i) {
      const unsigned entry = threadIdx.x + i * C::kThreads, group = first_group_ + (entry & (many - 1));
      const unsigned row = first_row_ + (entry >> shift_);
      const bool valid = entry >> shift_ < C::kRows && group < p.groups && row < p.rows;
      sums_[i] = valid ? p.row_sums[static_cast<std::size_t>(row) * p.groups + group] : 0;
    }
  }

  GRAPHROT_DEVICE void keep(const ProductArguments& p, Shared<float> scales, Shared<int> zeros,
                            Shared<int> sums) const {
    if (!begins_) return;
    const unsigned many = 1u << shift_;
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < C::kScaleLoads; ++i) {
      const unsigned entry = threadIdx.x + i * C::kThreads, column = entry >> shift_;
      const unsigned at = (first_group_ + (entry & (many - 1))) % C::kSlots * C::kColumnPitch + column;
      if (column < C::kColumns) {
        scales[at] = scales_[i];
        if (p.zeros != nullptr) zeros[at] = zeros_[i];
      }
    }
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < C::kSumLoads; ++i) {
      const unsigned entry = threadIdx.x + i * C::kThreads, row = entry >> shift_;
      const unsigned at = (first_group_ + (entry & (many - 1))) % C::kSlots * C::kRowPitch + row;
      if (row < C::kRows) sums[at] = p.zeros != nullptr ? -sums_[i] : kWhole - p.zero * sums_[i];
    }
  }

 private:
  unsigned first_row_, first_column_, shift_, first_group_ = 0;
  bool begins_ = true;
  float scales_[C::kScaleLoads];
  int zeros_[C::kScaleLoads], sums_[C::kSumLoads];
};

template <class C>
using TileSums = int[C::kDown][C::kAcross][4];
template <class C>
using TileTotals = float[C::kDown][C::kAcross][4];

}  // namespace graphrot::cuda
