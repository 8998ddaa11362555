// Sums of a tile to outputs.
#pragma once

#include "matmul/product_stage.cuh"

namespace graphrot::cuda {

GRAPHROT_DEVICE void put_pair(Shared<std::uint8_t> memory, unsigned at, float first, float second, float) {
  memory.vector<float2>(at) = make_float2(first, second);
}

template <class T>
GRAPHROT_DEVICE void put_pair(Shared<std::uint8_t> memory, unsigned at, float first, float second, T type) {
  memory.vector<unsigned>(at) = narrow_pair(first, second, type);
}

// A warp's outputs: 16 rows at a time go through shared memory of its own, so that 16 bytes of a row are stored at
// once. The pitch of the rows there keeps writes of 8 rows (of 4 with float, half a warp) in different banks.
template <class C>
struct TileOutput {
  Shared<std::uint8_t> memory;
  Shared<float> biases, scales;  // of the block's columns
  Shared<int> zeros;
  unsigned row, column;          // the warp's first ones
  unsigned across;               // its first column within the block

  template <class T>
  static constexpr unsigned kBytes = C::kWarpColumns * sizeof(T);
  template <class T>
  static constexpr unsigned kPitch = kBytes<T> + (sizeof(T) == 4 ? 32 : 16);

  template <class T>
  GRAPHROT_DEVICE void finish(const ProductArguments& p, const TileSums<C>& sums, const TileTotals<C>& totals) const {
    const unsigned lane = threadIdx.x % kWarp;
    GRAPHROT_UNROLL
    for (unsigned d = 0; d < C::kDown; ++d) {
      float by[2];
      int all[2] = {0, 0};
      GRAPHROT_UNROLL
      for (unsigned h = 0; h < 2; ++h) {
        const unsigned r = row + 16 * d + 8 * h + lane / 4;
        by[h] = r < p.rows ? p.row_scales[r] : 0.0f;
        if (!C::kGrouped && r < p.rows) all[h] = p.row_sums[r];
      }
      GRAPHROT_UNROLL
      for (unsigned a = 0; a < C::kAcross; ++a) {
        const unsigned at = 8 * a + lane % 4 * 2;
        float products[4];
        scaled(across + at, sums[d][a], totals[d][a], all, products);
        const float2 bias = biases.template vector<float2>(across + at);
        GRAPHROT_UNROLL
        for (unsigned h = 0; h < 2; ++h) {
          put_pair(memory, (8 * h + lane / 4) * kPitch<T> + at * static_cast<unsigned>(sizeof(T)),
                   fmaf(products[2 * h], by[h], bias.x), fmaf(products[2 * h + 1], by[h], bias.y), T{});
        }
      }
      __syncwarp();
      store_rows<T>(p, row + 16 * d);
      __syncwarp();
    }
  }

 private:
  // Totals over the groups; with one scale per column they are made here.
  GRAPHROT_DEVICE void scaled(unsigned at, const int (&sums)[4], const float (&totals)[4], const int (&all)[2],
                              float (&products)[4]) const {
    if constexpr (C::kGrouped) {
      GRAPHROT_UNROLL
      for (unsigned i = 0; i < 4; ++i) products[i] = totals[i];
    } else {
      const float2 scale = scales.template vector<float2>(at);
      const int2 zero = zeros.template vector<int2>(at);
      GRAPHROT_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        const int sum = sums[i] - (i % 2 == 0 ? zero.x : zero.y) * all[i / 2];
        products[i] = fmaf(static_cast<float>(sum), i % 2 == 0 ? scale.x : scale.y, 0.0f);
      }
    }
  }

  template <class T>
  GRAPHROT_DEVICE void store_rows(const ProductArguments& p, unsigned first) const {
    const unsigned lane = threadIdx.x % kWarp;
    T* out = static_cast<T*>(p.out);
    if (p.wide) {
      constexpr unsigned kPieces = kBytes<T> / 16;
      GRAPHROT_UNROLL
      for (unsigned turn = 0; turn < 16 * kPieces / kWarp; ++turn) {
        const unsigned i = turn * kWarp + lane, r = i / kPieces, c = i % kPieces * kPack<T>;
        if (first + r >= p.rows || column + c >= p.columns) continue;
        const uint4 piece = memory.template vector<uint4>(r * kPitch<T> + i % kPieces * 16);
        store16(out + static_cast<std::size_t>(first + r) * p.columns + column + c, piece);
      }
      return;
    }
    for (unsigned i = lane; i < 16 * C::kWarpColumns; i += kWarp) {
      const unsigned r = i / C::kWarpColumns, c = i % C::kWarpColumns;
      if (first + r >= p.rows || column + c >= p.columns) continue;
      const T value = memory.template vector<T>(r * kPitch<T> + c * static_cast<unsigned>(sizeof(T)));
      out[static_cast<std::size_t>(first + r) * p.columns + column + c] = value;
    }
  }
};

}  // namespace graphrot::cuda
