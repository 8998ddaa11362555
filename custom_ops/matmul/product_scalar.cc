// The path for every machine: one row at a time by 64 columns of unpacked codes, in plain C++.
#include "matmul/product.h"

namespace graphrot {
namespace {

constexpr std::size_t kChannels = 256;  // unpacked together; no group of several straddles two such blocks
constexpr std::size_t kRows = 64;       // share what is unpacked

constexpr std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

// panel[k][c] = code of channel begin + k, for `count` channels; `begin` is a multiple of 8.
void unpack(const ProductProblem& problem, std::size_t tile, std::size_t begin, std::size_t count,
            std::uint8_t* panel) {
  const std::size_t per_unit = problem.bits == 4 ? 8 : 4;
  const std::uint8_t* unit = problem.codes + (tile * problem.units + begin / per_unit) * kUnitBytes;
  for (std::size_t k = 0; k < count; ++k) {
    const std::uint8_t* from = unit + k / per_unit * kUnitBytes + k % 4;
    const int shift = k % per_unit < 4 ? 0 : 4, mask = problem.bits == 4 ? 15 : 255;
    for (std::size_t c = 0; c < kTileColumns; ++c) {
      panel[k * kTileColumns + c] = static_cast<std::uint8_t>((from[4 * c] >> shift) & mask);
    }
  }
}

void multiply(const std::int8_t* codes, const std::uint8_t* panel, std::size_t count, std::int32_t* sums) {
  for (std::size_t k = 0; k < count; ++k, panel += kTileColumns) {
    const std::int32_t a = codes[k];
    for (std::size_t c = 0; c < kTileColumns; ++c) sums[c] += a * panel[c];
  }
}

// totals += scale * (sums - zero * sum of the row's codes)
void scale_group(const ProductProblem& problem, std::size_t tile, std::size_t group, std::int32_t row_sum,
                 const std::int32_t* sums, float* totals) {
  const std::size_t start = (tile * problem.groups + group) * kTileColumns;
  for (std::size_t c = 0; c < kTileColumns; ++c) {
    const std::int32_t zero = problem.zeros != nullptr ? problem.zeros[start + c] : problem.zero;
    totals[c] += problem.scales[start + c] * static_cast<float>(sums[c] - zero * row_sum);
  }
}

template <class T>
void finish(const ProductProblem& problem, std::size_t tile, float scale, const float* totals, T* out) {
  const std::size_t start = tile * kTileColumns, count = smaller(problem.columns - start, kTileColumns);
  for (std::size_t c = 0; c < count; ++c) {
    const float bias = problem.bias != nullptr ? problem.bias[start + c] : 0.0f;
    from_float(totals[c] * scale + bias, out + start + c);
  }
}

template <class T>
void block_of_rows(const ProductProblem& problem, const QuantizedRows& rows, std::size_t first, std::size_t count,
                   std::size_t tile, T* out, std::size_t out_stride, void* scratch) {
  auto* totals = static_cast<float*>(scratch);
  auto* sums = reinterpret_cast<std::int32_t*>(totals + kRows * kTileColumns);
  auto* panel = reinterpret_cast<std::uint8_t*>(sums + kRows * kTileColumns);
  for (std::size_t i = 0; i < count * kTileColumns; ++i) {
    totals[i] = 0.0f;
    sums[i] = 0;
  }
  for (std::size_t begin = 0; begin < problem.channels; begin += kChannels) {
    const std::size_t end = smaller(begin + kChannels, problem.channels);
    unpack(problem, tile, begin, end - begin, panel);
    for (std::size_t from = begin, to; from < end; from = to) {
      const std::size_t group = from / problem.group;
      to = smaller(end, (group + 1) * problem.group);
      const bool whole = to == problem.channels || to == (group + 1) * problem.group;
      for (std::size_t r = 0; r < count; ++r) {
        std::int32_t* row_sums = sums + r * kTileColumns;
        const std::int8_t* codes = rows.codes + (first + r) * rows.stride + from;
        multiply(codes, panel + (from - begin) * kTileColumns, to - from, row_sums);
        if (!whole) continue;
        scale_group(problem, tile, group, rows.sums[(first + r) * problem.groups + group], row_sums,
                    totals + r * kTileColumns);
        for (std::size_t c = 0; c < kTileColumns; ++c) row_sums[c] = 0;
      }
    }
  }
  for (std::size_t r = 0; r < count; ++r) {
    finish(problem, tile, rows.scales[first + r], totals + r * kTileColumns, out + (first + r) * out_stride);
  }
}

template <class T>
void run(const ProductProblem& problem, const QuantizedRows& rows, std::size_t count, std::size_t first_tile,
         std::size_t last_tile, void* out, std::size_t out_stride, void* scratch) {
  for (std::size_t tile = first_tile; tile < last_tile; ++tile) {
    for (std::size_t row = 0; row < count; row += kRows) {
      block_of_rows(problem, rows, row, smaller(count - row, kRows), tile, static_cast<T*>(out), out_stride, scratch);
    }
  }
}

constexpr ProductKernels kKernels = {{&run<float>, &run<Half>, &run<BFloat16>}};

}  // namespace

const ProductKernels& product_scalar() { return kKernels; }

}  // namespace graphrot
