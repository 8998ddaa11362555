// Many rows: a block of threads makes a tile of outputs, over stages of 64 bytes of every column (128 channels of
// 4 bits, 64 of 8) that cp.async brings to shared memory some stages ahead, with one barrier a stage.
//
// What bounds it, for each of the 128 channels of a stage: a multiprocessor multiplies 2560 (mma.sync on sm_90) to 2048
// (sm_80) bytes in a cycle and reads 128 bytes of shared memory; a warp's tile of r rows and c columns costs r + c / 2
// bytes of shared memory and 3 / 256 instructions a weight for unpacking, for r * c products. So tiles are wide:
// weights are the cheaper side. 64 by 64 for a warp take 128 registers of sums; with groups, sums of a group and
// floats of all before it live side by side, so that it is 32 by 64.
#pragma once

#include "matmul/product_finish.cuh"
#include "matmul/product_stage.cuh"

namespace graphrot::cuda {

template <class C>
struct TileFragments {
  unsigned rows[C::kDown][4];
  Packed<C::kBits> columns[C::kAcross];

  GRAPHROT_DEVICE void load(Shared<std::uint8_t> memory, unsigned rows_at, unsigned columns_at) {
    GRAPHROT_UNROLL
    for (unsigned d = 0; d < C::kDown; ++d) load_matrices(rows[d], memory.at(rows_at + 16 * d * C::kRowBytes));
    GRAPHROT_UNROLL
    for (unsigned a = 0; a < C::kAcross; ++a) columns[a].load(memory, columns_at + 8 * a * C::kColumnBytes);
  }
};

// One step of 32 channels. `starts`: sums of rows and of rows 8 below, which a new group starts from in all columns;
// they are the mma's third operand as they are, and need not be moved.
template <class C, bool Starts>
GRAPHROT_DEVICE void multiply(const TileFragments<C>& fragments, const int (&starts)[C::kDown][2], TileSums<C>& sums) {
  GRAPHROT_UNROLL
  for (unsigned a = 0; a < C::kAcross; ++a) {
    unsigned b[2];
    fragments.columns[a].unpack(b);
    GRAPHROT_UNROLL
    for (unsigned d = 0; d < C::kDown; ++d) {
      int(&sum)[4] = sums[d][a];
      if (Starts) sum[0] = sum[1] = starts[d][0], sum[2] = sum[3] = starts[d][1];
      mma_m16n8k32(sum, fragments.rows[d], b);
    }
  }
}

// Groups are added in order, as on the CPU: fma(sum, scale, total).
template <class C>
GRAPHROT_DEVICE void scale_group(Shared<float> scales, unsigned at, const TileSums<C>& sums, TileTotals<C>& totals) {
  GRAPHROT_UNROLL
  for (unsigned a = 0; a < C::kAcross; ++a) {
    const float2 scale = scales.vector<float2>(at + 8 * a);
    GRAPHROT_UNROLL
    for (unsigned d = 0; d < C::kDown; ++d) {
      GRAPHROT_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        totals[d][a][i] = fmaf(whole_to_float(sums[d][a][i]), i % 2 == 0 ? scale.x : scale.y, totals[d][a][i]);
      }
    }
  }
}

// Blocks take tiles in an order in which those that run at once share rows and columns: down first, within 2048 rows,
// whose codes stay in the second-level cache while the weights pass by.
template <class C>
GRAPHROT_DEVICE void find_tile(const ProductArguments& p, unsigned* row, unsigned* column) {
  constexpr unsigned kBand = 2048 / C::kRows;
  const unsigned down = (p.rows + C::kRows - 1) / C::kRows, across = (p.columns + C::kColumns - 1) / C::kColumns;
  const unsigned band = blockIdx.x / (kBand * across), left = blockIdx.x - band * kBand * across;
  const unsigned high = down - band * kBand < kBand ? down - band * kBand : kBand;
  *row = (band * kBand + left % high) * C::kRows;
  *column = left / high * C::kColumns;
}

// What a group starts from, and where its scales and zero points are.
template <class C>
struct TileGroup {
  Shared<float> scales;
  Shared<int> zeros, sums;  // sums: of codes, times -1 where there are zero points; else all that a sum starts from
  unsigned row, column;     // of this lane, within the block

  // Step `step` of all channels: a new group begins in front of it, or one is complete after it.
  GRAPHROT_DEVICE void multiply_step(const ProductArguments& p, const TileFragments<C>& fragments, unsigned step,
                                     bool at_end, int (&starts)[C::kDown][2], TileSums<C>& sums_of,
                                     TileTotals<C>& totals) const {
    const unsigned group = step >> p.group_shift, slot = group % C::kSlots;
    if (group >= p.groups) return;  // only zeros are left
    const bool first = group << p.group_shift == step, last = at_end || (group + 1) << p.group_shift == step + 1;
    if (first) {
      GRAPHROT_UNROLL
      for (unsigned d = 0; d < C::kDown; ++d) {
        starts[d][0] = sums[slot * C::kRowPitch + row + 16 * d];
        starts[d][1] = sums[slot * C::kRowPitch + row + 16 * d + 8];
      }
    }
    if (first && p.zeros == nullptr) {
      multiply<C, true>(fragments, starts, sums_of);
    } else {
      if (first) start(slot, starts, sums_of);
      multiply<C, false>(fragments, starts, sums_of);
    }
    if (last) scale_group<C>(scales, slot * C::kColumnPitch + column, sums_of, totals);
  }

  GRAPHROT_DEVICE void start(unsigned slot, const int (&starts)[C::kDown][2], TileSums<C>& sums_of) const {
    GRAPHROT_UNROLL
    for (unsigned a = 0; a < C::kAcross; ++a) {
      const int2 zero = zeros.template vector<int2>(slot * C::kColumnPitch + column + 8 * a);
      GRAPHROT_UNROLL
      for (unsigned d = 0; d < C::kDown; ++d) {
        GRAPHROT_UNROLL
        for (unsigned i = 0; i < 4; ++i) {
          sums_of[d][a][i] = kWhole + (i % 2 == 0 ? zero.x : zero.y) * starts[d][i / 2];
        }
      }
    }
  }
};

template <class C>
GRAPHROT_KERNEL(C::kThreads, C::kBlocks) product_tile(const ProductArguments p) {
  const auto memory = shared_array<std::uint8_t>(0, C::kBias);
  const auto biases = shared_array<float>(C::kBias, C::kColumns);
  const auto scales = shared_array<float>(C::kScales, C::kSlots * C::kColumnPitch);
  const auto zeros = shared_array<int>(C::kZeros, C::kSlots * C::kColumnPitch);
  const auto row_sums = shared_array<int>(C::kSums, C::kGrouped ? C::kSlots * C::kRowPitch : 0);
  constexpr unsigned kWarpsAcross = C::kColumns / C::kWarpColumns;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned warp_row = warp / kWarpsAcross * C::kWarpRows, warp_column = warp % kWarpsAcross * C::kWarpColumns;
  unsigned row = 0, column = 0;
  find_tile<C>(p, &row, &column);

  TileCopies<C> copies(p, row, column);
  const unsigned stages = (p.code_bytes + C::kRowBytes - 1) / C::kRowBytes;
  GRAPHROT_UNROLL
  for (unsigned stage = 0; stage + 1 < C::kStages; ++stage) {
    if (stage < stages) copies.next(p, memory, stage);
    cp_async_commit();
  }
  TileGroups<C> groups(p, row, column);
  for (unsigned c = threadIdx.x; c < C::kColumns; c += C::kThreads) {
    const bool valid = column + c < p.columns;
    biases[c] = valid ? load_bias(p, column + c) : 0.0f;
    if constexpr (!C::kGrouped) {
      scales[c] = valid ? load_scale(p, column + c, 0) : 0.0f;
      zeros[c] = valid ? load_zero<C::kBits>(p, column + c, 0) : 0;
    }
  }
  if constexpr (C::kGrouped) {
    groups.load(p, 0);
    groups.keep(p, scales, zeros, row_sums);
  }

  TileSums<C> sums;
  TileTotals<C> totals;
  int starts[C::kDown][2] = {};
  GRAPHROT_UNROLL
  for (unsigned d = 0; d < C::kDown; ++d) {
    GRAPHROT_UNROLL
    for (unsigned a = 0; a < C::kAcross; ++a) {
      GRAPHROT_UNROLL
      for (unsigned i = 0; i < 4; ++i) sums[d][a][i] = 0, totals[d][a][i] = 0.0f;
    }
  }
  const TileGroup<C> group = {scales, zeros, row_sums, warp_row + lane / 4, warp_column + lane % 4 * 2};

  // Where this lane finds its part of the first step; the other steps' are at the same place but for the piece.
  const unsigned rows_at = place<C::kRowBytes>(warp_row + lane % 16, lane / 16 * 16);
  const unsigned columns_at = C::kColumnsAt + place<C::kColumnBytes>(warp_column + lane / 4, lane % 4 * 4);
  unsigned slot = 0, free_slot = C::kStages - 1;
  for (unsigned stage = 0; stage < stages; ++stage) {
    cp_async_wait<static_cast<int>(C::kStages) - 2>();
    __syncthreads();  // copies of all threads are seen, and nobody reads the stage before any more
    if (stage + C::kStages - 1 < stages) copies.next(p, memory, free_slot);
    cp_async_commit();
    const bool more = stage + 1 < stages;
    if (C::kGrouped && more) groups.load(p, stage + 1);

    const unsigned base = slot * C::kStageBytes;
    TileFragments<C> fragments[2];
    fragments[0].load(memory, base + rows_at, base + columns_at);
    GRAPHROT_UNROLL
    for (unsigned s = 0; s < C::kSteps; ++s) {
      if (s + 1 < C::kSteps) {  // while this step is multiplied
        fragments[(s + 1) % 2].load(memory, base + (rows_at ^ ((s + 1) * 32)),
                                    base + (columns_at ^ ((s + 1) * kStepBytes<C::kBits>)));
      }
      if constexpr (C::kGrouped) {
        const bool at_end = !more && s + 1 == C::kSteps;
        group.multiply_step(p, fragments[s % 2], stage * C::kSteps + s, at_end, starts, sums, totals);
      } else {
        multiply<C, false>(fragments[s % 2], starts, sums);
      }
    }
    if (C::kGrouped && more) groups.keep(p, scales, zeros, row_sums);
    slot = slot + 1 == C::kStages ? 0 : slot + 1;
    free_slot = free_slot + 1 == C::kStages ? 0 : free_slot + 1;
  }

  __syncthreads();  // the stages make room for outputs
  constexpr unsigned kOwnBytes = 16 * (4 * C::kWarpColumns + 32);
  static_assert(kOwnBytes * (C::kThreads / kWarp) <= C::kBias, "room for sixteen rows of every warp");
  const TileOutput<C> output = {memory.part(warp * kOwnBytes, kOwnBytes), biases, scales, zeros, row + warp_row,
                                column + warp_column, warp_column};
  if (p.element == Element::kHalf) {
    output.template finish<Half>(p, sums, totals);
  } else if (p.element == Element::kBFloat16) {
    output.template finish<BFloat16>(p, sums, totals);
  } else {
    output.template finish<float>(p, sums, totals);
  }
}

}  // namespace graphrot::cuda
