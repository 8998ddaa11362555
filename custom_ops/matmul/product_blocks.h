// The loops around the kernels of one instruction set V, which is a struct in an unnamed namespace, so that nothing
// instantiated here is shared between object files (see hadamard/avx2.cc). For a tile of 64 columns:
//   few rows (decode): V::direct multiplies packed weights as they stream by, each read once;
//   many rows (prefill): V::unpack makes bytes of V::kChannels channels, which V::panel multiplies by V::kRows rows
//   at a time.
// Both leave floats, sums over the groups times their scales, in `totals` [rows][64]; V::finish makes outputs of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matmul/product.h"

namespace graphrot::blocks {

constexpr std::size_t kPanelBytes = 128 * 1024;  // at most: V::kChannels channels of 64 columns
constexpr std::size_t kStreams = kTilesTogether;
constexpr std::size_t kStreamChannels = 32;  // of each in turn: 1 KiB of 4 bits
constexpr std::size_t kTiledBytes = 832 * 1024;  // of the path that multiplies tiles
constexpr std::size_t kRowBlock = 256;  // rows that share a panel; their totals stay in the second-level cache

// Some rows and some channels of one tile.
struct Part {
  const ProductProblem* problem;
  std::size_t tile;
  std::size_t begin, end;     // channels; begin is at the start of a group where there are several
  const std::int8_t* codes;   // of the first row, channel 0
  std::size_t stride;
  const std::int32_t* sums;   // of the first row, group 0
  const std::uint8_t* panel;  // unpacked from `begin` on
  float* totals;
  void* partial;              // sums of a group that goes on behind `end`: 64 int32 for each row; may be `totals`
};

template <class V, int Rows>
void direct(std::size_t rows, const Part& part) {
  if (rows == Rows) return V::template direct<Rows>(part);
  if constexpr (Rows > 1) direct<V, Rows - 1>(rows, part);
}

template <class V, int Rows>
void panel(std::size_t rows, const Part& part) {
  if (rows == Rows) return V::template panel<Rows>(part);
  if constexpr (Rows > 1) panel<V, Rows - 1>(rows, part);
}

template <class V, class T>
void finish(const ProductProblem& problem, const QuantizedRows& rows, std::size_t first, std::size_t count,
            std::size_t tile, const float* totals, T* out, std::size_t out_stride) {
  for (std::size_t r = 0; r < count; ++r) {
    V::finish(problem, tile, rows.scales[first + r], totals + r * kTileColumns, out + (first + r) * out_stride);
  }
}

// Tiles [first_tile, last_tile), at most kStreams. One core gets more out of memory when it reads in several places,
// a little in each before it turns to the next.
template <class V, class T>
void few_rows(const ProductProblem& problem, const QuantizedRows& rows, std::size_t count, std::size_t first_tile,
              std::size_t last_tile, T* out, std::size_t out_stride, float* totals) {
  float* partial = totals + kStreams * count * kTileColumns;
  for (std::size_t begin = 0; begin < problem.channels; begin += kStreamChannels) {
    const std::size_t left = problem.channels - begin, end = begin + (left < kStreamChannels ? left : kStreamChannels);
    for (std::size_t tile = first_tile; tile < last_tile; ++tile) {
      const std::size_t at = (tile - first_tile) * count * kTileColumns;
      const Part part = {&problem,  tile,    begin,       end,         rows.codes, rows.stride,
                         rows.sums, nullptr, totals + at, partial + at};
      direct<V, V::kDirect>(count, part);
    }
  }
  for (std::size_t tile = first_tile; tile < last_tile; ++tile) {
    finish<V>(problem, rows, 0, count, tile, totals + (tile - first_tile) * count * kTileColumns, out, out_stride);
  }
}

// The largest of `Tiles`, `Tiles` - 1, ... that is `tiles`.
template <class V, int Rows, int Tiles>
void together(std::size_t tiles, const Part& part) {
  if (tiles == Tiles) return V::template together<Rows, Tiles>(part);
  if constexpr (Tiles > 1) together<V, Rows, Tiles - 1>(tiles, part);
}

// At most a few rows, for which the sums of several tiles stay in registers. False: there are too many rows.
template <class V, int Rows, class T>
bool very_few_rows(const ProductProblem& problem, const QuantizedRows& rows, std::size_t count, std::size_t first_tile,
                   std::size_t last_tile, T* out, std::size_t out_stride, float* totals) {
  constexpr int kTiles = static_cast<int>(V::kSums) / Rows;
  if constexpr (kTiles > 1) {
    if (count != Rows) {
      return very_few_rows<V, Rows + 1>(problem, rows, count, first_tile, last_tile, out, out_stride, totals);
    }
    const std::size_t tiles = last_tile - first_tile, turns = (tiles + kTiles - 1) / kTiles;
    for (std::size_t turn = 0; turn < turns; ++turn) {
      const std::size_t first = first_tile + tiles * turn / turns, last = first_tile + tiles * (turn + 1) / turns;
      const Part part = {&problem,  first,   0,      problem.channels, rows.codes, rows.stride,
                         rows.sums, nullptr, totals, nullptr};
      together<V, Rows, kTiles>(last - first, part);
      for (std::size_t tile = first; tile < last; ++tile) {
        finish<V>(problem, rows, 0, count, tile, totals + (tile - first) * Rows * kTileColumns, out, out_stride);
      }
    }
    return true;
  } else {
    return false;
  }
}

template <class V, class T>
void many_rows(const ProductProblem& problem, const QuantizedRows& rows, std::size_t first, std::size_t count,
               std::size_t tile, T* out, std::size_t out_stride, float* totals, std::uint8_t* buffer) {
  for (std::size_t begin = 0; begin < problem.channels; begin += V::kChannels) {
    const bool last = problem.channels - begin <= V::kChannels;
    const std::size_t end = last ? problem.channels : begin + V::kChannels;
    const std::uint8_t* unpacked = V::unpack(problem, tile, begin, end, buffer);
    for (std::size_t r = 0; r < count; r += V::kRows) {
      const std::size_t row = first + r, left = count - r < V::kRows ? count - r : V::kRows;
      float* to = totals + r * kTileColumns;
      const Part part = {&problem,  tile, begin, end, rows.codes + row * rows.stride, rows.stride,
                         rows.sums + row * problem.groups, unpacked, to, to};
      panel<V, V::kRows>(left, part);
      if (last) finish<V>(problem, rows, row, left, tile, to, out, out_stride);
    }
  }
}

template <class V, class T>
void run(const ProductProblem& problem, const QuantizedRows& rows, std::size_t count, std::size_t first_tile,
         std::size_t last_tile, void* out, std::size_t out_stride, void* scratch) {
  static_assert(V::kPanelBytes <= kPanelBytes);
  static_assert(2 * V::kDirect * kStreams * kTileColumns * sizeof(float) <= kPanelBytes, "for totals and partial sums");
  T* to = static_cast<T*>(out);
  auto* totals = static_cast<float*>(scratch);
  auto* buffer = reinterpret_cast<std::uint8_t*>(totals + (count < kRowBlock ? count : kRowBlock) * kTileColumns);
  if (very_few_rows<V, 1>(problem, rows, count, first_tile, last_tile, to, out_stride, totals)) return;
  if (count <= V::kDirect) {
    const std::size_t tiles = last_tile - first_tile, turns = (tiles + kStreams - 1) / kStreams;
    for (std::size_t turn = 0; turn < turns; ++turn) {  // of nearly equal size: nine tiles are five and four
      few_rows<V>(problem, rows, count, first_tile + tiles * turn / turns, first_tile + tiles * (turn + 1) / turns, to,
                  out_stride, totals);
    }
    return;
  }
  for (std::size_t row = 0; row < count; row += kRowBlock) {
    const std::size_t left = count - row < kRowBlock ? count - row : kRowBlock;
    for (std::size_t tile = first_tile; tile < last_tile; ++tile) {
      many_rows<V>(problem, rows, row, left, tile, to, out_stride, totals, buffer);
    }
  }
}

template <class V>
constexpr ProductKernels kernels() {
  return {{&run<V, float>, &run<V, Half>, &run<V, BFloat16>}};
}

}  // namespace graphrot::blocks
