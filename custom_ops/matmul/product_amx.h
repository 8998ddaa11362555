// The product in tiles of 16 rows by 16 columns, over a policy Tiles that loads, multiplies and stores them: that of
// product_amx.cc has the instructions, that of the tests has none. Tiles and all here live in unnamed namespaces.
//   0 to 3: sums; 4, 5: activations, 16 rows of `step` channels; 6, 7: weights, step / 4 by 16 columns of 4 channels.
// A step is 64 channels, or 32 where these share a scale. Few rows take the path of VNNI.
#pragma once

#include "matmul/product_avx512.h"

namespace graphrot {
namespace {

constexpr std::size_t kTileRows = 16;
constexpr std::size_t kLeastRows = 13;     // below, tiles would be too empty
constexpr std::size_t kAmxChannels = 1024; // unpacked and multiplied together
constexpr std::size_t kAmxTiles = 8;       // of 64 columns, that share packed activations
constexpr std::size_t kAmxRows = 256;
static_assert(blocks::kTiledBytes ==
              kAmxRows * kAmxTiles * kTileColumns * sizeof(float) + (kAmxRows + kTileColumns) * kAmxChannels);

// Channels [begin, end) of up to 256 rows, as [rows / 16][steps][16][step]; missing rows are zeros.
inline void pack_rows(const QuantizedRows& rows, std::size_t first, std::size_t count, std::size_t begin,
                      std::size_t steps, std::size_t step, std::int8_t* to) {
  const auto bytes = static_cast<__mmask64>(step == 64 ? ~std::uint64_t{0} : 0xffffffffu);
  for (std::size_t r = 0; r < (count + kTileRows - 1) / kTileRows * kTileRows; ++r) {
    const std::int8_t* from = rows.codes + (first + r) * rows.stride + begin;
    std::int8_t* row = to + r / kTileRows * steps * kTileRows * step + r % kTileRows * step;
    for (std::size_t s = 0; s < steps; ++s, row += kTileRows * step) {
      const __m512i codes = r < count ? _mm512_maskz_loadu_epi8(bytes, from + s * step) : _mm512_setzero_si512();
      _mm512_mask_storeu_epi8(row, bytes, codes);
    }
  }
}

// Channels [begin, end) of 64 columns, as [steps][4][step / 4][64 bytes]. Behind the last channel anything may stand:
// activations are zero there.
inline void unpack_tile(const ProductProblem& problem, std::size_t tile, std::size_t begin, std::size_t end,
                        std::size_t step, std::uint8_t* to) {
  const bool halves = problem.bits == 4;
  const std::size_t quads = step / 4, units = (end - begin + 7) / 8 * (halves ? 1 : 2);
  const std::uint8_t* unit = problem.codes + (tile * problem.units + begin / (halves ? 8 : 4)) * kUnitBytes;
  const __m512i low = _mm512_set1_epi8(15);
  std::size_t quad = 0;
  for (std::size_t u = 0; u < units; ++u, unit += kUnitBytes) {
    for (int v = 0; v < kVectors; ++v) {
      const __m512i codes = _mm512_loadu_si512(unit + 64 * v);
      std::uint8_t* at = to + (static_cast<std::size_t>(v) * quads + quad) * 64;
      if (halves) {
        _mm512_storeu_si512(at, _mm512_and_si512(codes, low));
        _mm512_storeu_si512(at + 64, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
      } else {
        _mm512_storeu_si512(at, codes);
      }
    }
    quad += halves ? 2 : 1;
    if (quad == quads) {
      quad = 0;
      to += kVectors * quads * 64;
    }
  }
}

// Sums of 16 or 32 rows by 64 columns over `steps`, from those in memory on or from zero.
template <class Tiles, std::size_t RowTiles>
inline void multiply_tiles(const std::int8_t* a, std::size_t next_rows, const std::uint8_t* w, std::size_t steps,
                           std::size_t step, bool go_on, std::int32_t* sums) {
  const std::size_t a_step = kTileRows * step, w_tile = step / 4 * 64, w_step = kVectors * w_tile;
  constexpr std::size_t kRowBytes = kTileColumns * sizeof(std::int32_t), kDown = kTileRows * kTileColumns;
  constexpr std::size_t kParts = RowTiles;  // two by two tiles of sums, or one by four
  for (std::size_t part = 0; part < kParts; ++part) {
    std::int32_t* to = sums + part * 32;
    std::int32_t* to2 = RowTiles == 2 ? to + kDown : to + 32;
    if (go_on) {
      Tiles::template load<0>(to, kRowBytes);
      Tiles::template load<1>(to + 16, kRowBytes);
      Tiles::template load<2>(to2, kRowBytes);
      Tiles::template load<3>(to2 + 16, kRowBytes);
    } else {
      Tiles::template zero<0>();
      Tiles::template zero<1>();
      Tiles::template zero<2>();
      Tiles::template zero<3>();
    }
    const std::int8_t* rows = a;
    const std::uint8_t* weights = w + 2 * part * w_tile;
    for (std::size_t s = 0; s < steps; ++s, rows += a_step, weights += w_step) {
      Tiles::template load<4>(rows, step);
      Tiles::template load<6>(weights, 64);
      Tiles::template add_product<0, 4, 6>();
      Tiles::template load<7>(weights + w_tile, 64);
      Tiles::template add_product<1, 4, 7>();
      if constexpr (RowTiles == 2) {
        Tiles::template load<5>(rows + next_rows, step);
        Tiles::template add_product<2, 5, 6>();
        Tiles::template add_product<3, 5, 7>();
      } else {
        Tiles::template load<6>(weights + 2 * w_tile, 64);
        Tiles::template add_product<2, 4, 6>();
        Tiles::template load<7>(weights + 3 * w_tile, 64);
        Tiles::template add_product<3, 4, 7>();
      }
    }
    Tiles::template store<0>(to, kRowBytes);
    Tiles::template store<1>(to + 16, kRowBytes);
    Tiles::template store<2>(to2, kRowBytes);
    Tiles::template store<3>(to2 + 16, kRowBytes);
  }
}

// Sums of products to totals; `sums` may be where the totals go.
template <int Rows>
inline void scale_rows(const ProductProblem& problem, std::size_t tile, std::size_t group, const std::int32_t* row_sums,
                       const std::int32_t* sums, float* totals) {
  __m512i sum[Rows][kVectors];
  start_group<Rows>(problem, tile, group, row_sums, sum);
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = _mm512_add_epi32(sum[r][v], _mm512_loadu_si512(sums + (4 * r + v) * 16));
    }
  }
  scale_group<Rows>(problem, tile, group, sum, totals);
}

inline void scale_all(const ProductProblem& problem, std::size_t tile, std::size_t group, std::size_t count,
                      const std::int32_t* row_sums, const std::int32_t* sums, float* totals) {
  for (; count >= 4; count -= 4) {
    scale_rows<4>(problem, tile, group, row_sums, sums, totals);
    row_sums += 4 * problem.groups;
    sums += 4 * kTileColumns;
    totals += 4 * kTileColumns;
  }
  for (; count > 0; --count) {
    scale_rows<1>(problem, tile, group, row_sums, sums, totals);
    row_sums += problem.groups;
    sums += kTileColumns;
    totals += kTileColumns;
  }
}

// What one tile of 64 columns is made from: packed rows and an unpacked panel of channels [begin, end).
struct AmxPart {
  const ProductProblem* problem;
  std::size_t tile, begin, end, step, steps;
  std::size_t count;             // of rows
  const std::int32_t* row_sums;  // of the first row
  const std::int8_t* rows;
  const std::uint8_t* panel;
  float* totals;
};

template <class Tiles, std::size_t RowTiles>
inline void some_rows(const AmxPart& part, std::size_t r) {
  const ProductProblem& problem = *part.problem;
  const std::size_t next_rows = part.steps * kTileRows * part.step, w_step = kTileColumns * part.step;
  const std::size_t left = part.count - r, count = left < RowTiles * kTileRows ? left : RowTiles * kTileRows;
  const std::int8_t* a = part.rows + r / kTileRows * next_rows;
  const std::int32_t* row_sums = part.row_sums + r * problem.groups;
  float* totals = part.totals + r * kTileColumns;
  if (problem.groups == 1) {
    auto* sums = reinterpret_cast<std::int32_t*>(totals);
    multiply_tiles<Tiles, RowTiles>(a, next_rows, part.panel, part.steps, part.step, part.begin > 0, sums);
    if (part.end == problem.channels) scale_all(problem, part.tile, 0, count, row_sums, sums, totals);
    return;
  }
  alignas(64) std::int32_t sums[RowTiles * kTileRows * kTileColumns];
  const std::size_t steps = problem.group / part.step;
  for (std::size_t s = 0; s < part.steps; s += steps) {
    const std::size_t some = part.steps - s < steps ? part.steps - s : steps;
    multiply_tiles<Tiles, RowTiles>(a + s * kTileRows * part.step, next_rows, part.panel + s * w_step, some, part.step,
                                    false, sums);
    const std::size_t group = part.begin / problem.group + s / steps;
    scale_all(problem, part.tile, group, count, row_sums, sums, totals);
  }
}

template <class Tiles, class T>
inline void run_tiles(const ProductProblem& problem, const QuantizedRows& rows, std::size_t first, std::size_t count,
                      std::size_t first_tile, std::size_t last_tile, T* out, std::size_t out_stride, void* scratch) {
  auto* totals = static_cast<float*>(scratch);
  auto* packed = reinterpret_cast<std::int8_t*>(totals + kAmxRows * kAmxTiles * kTileColumns);
  auto* panel = reinterpret_cast<std::uint8_t*>(packed + kAmxRows * kAmxChannels);
  const std::size_t step = problem.group == 32 && problem.groups > 1 ? 32 : 64;
  for (std::size_t begin = 0, end; begin < problem.channels; begin = end) {
    end = problem.channels - begin <= kAmxChannels ? problem.channels : begin + kAmxChannels;
    const std::size_t steps = (end - begin + step - 1) / step;
    pack_rows(rows, first, count, begin, steps, step, packed);
    for (std::size_t tile = first_tile; tile < last_tile; ++tile) {
      unpack_tile(problem, tile, begin, end, step, panel);
      const AmxPart part = {&problem, tile,  begin, end, step, steps, count, rows.sums + first * problem.groups, packed,
                            panel,    totals + (tile - first_tile) * kAmxRows * kTileColumns};
      for (std::size_t r = 0; r < count; r += 2 * kTileRows) {
        if (count - r > kTileRows) {
          some_rows<Tiles, 2>(part, r);
        } else {
          some_rows<Tiles, 1>(part, r);
        }
      }
      if (end < problem.channels) continue;
      for (std::size_t r = 0; r < count; ++r) {
        const float* row_totals = part.totals + r * kTileColumns;
        finish_row(problem, tile, rows.scales[first + r], row_totals, out + (first + r) * out_stride);
      }
    }
  }
}

template <class Tiles, class T, Element E>
void run_amx(const ProductProblem& problem, const QuantizedRows& rows, std::size_t count, std::size_t first_tile,
             std::size_t last_tile, void* out, std::size_t out_stride, void* scratch) {
  if (count < kLeastRows) {
    const ProductRun few = product_vnni().run[static_cast<int>(E)];
    return few(problem, rows, count, first_tile, last_tile, out, out_stride, scratch);
  }
  Tiles::configure(problem.group == 32 && problem.groups > 1 ? 32 : 64);
  for (std::size_t row = 0; row < count; row += kAmxRows) {
    const std::size_t some = count - row < kAmxRows ? count - row : kAmxRows;
    for (std::size_t tile = first_tile; tile < last_tile; tile += kAmxTiles) {
      const std::size_t last = last_tile - tile < kAmxTiles ? last_tile : tile + kAmxTiles;
      run_tiles<Tiles>(problem, rows, row, some, tile, last, static_cast<T*>(out), out_stride, scratch);
    }
  }
  Tiles::release();
}

template <class Tiles>
constexpr ProductKernels amx_kernels() {
  return {{&run_amx<Tiles, float, Element::kFloat>, &run_amx<Tiles, Half, Element::kHalf>,
           &run_amx<Tiles, BFloat16, Element::kBFloat16>}};
}

}  // namespace
}  // namespace graphrot
