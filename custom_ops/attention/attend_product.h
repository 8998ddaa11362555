// The product of attend_panel.h, in tiles that stay in registers. Over a policy P (see there), and in an unnamed
// namespace like it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hadamard/mix.h"

namespace graphrot {
namespace {

constexpr std::size_t kRun = 16;  // numbers that are packed together, into kRunBytes
constexpr std::size_t kRunBytes = 32;

template <class P>
struct Product {
  using Float = typename P::Float;
  static constexpr std::size_t kVector = 4 * P::kLanes;

  template <int Rows, int Columns, class Sink>
  GRAPHROT_INLINE static void tile(const std::uint8_t* bytes, std::size_t depth, const std::uint8_t* numbers,
                                   std::size_t stride, const Sink& sink) {
    typename P::Acc acc[Rows][Columns];
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) acc[r][c] = P::Acc::zero();
    }
    for (std::size_t k = 0; k < depth; k += 4, bytes += 4 * kVector, numbers += kRunBytes) {
      for (int j = 0; j < 4; ++j) {
        typename P::Code code[Columns];
        for (int c = 0; c < Columns; ++c) {
          code[c] = P::Code::load(bytes + static_cast<std::size_t>(c) * depth * kVector +
                                  static_cast<std::size_t>(j) * kVector);
        }
        for (int r = 0; r < Rows; ++r) {
          const typename P::Number number = P::Number::load(numbers + static_cast<std::size_t>(r) * stride, j);
          for (int c = 0; c < Columns; ++c) acc[r][c].add(code[c], number);
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) sink(r, c, acc[r][c].total());
    }
  }

  template <int Rows, int Columns, class Sink>
  static void columns_of(const std::uint8_t* bytes, std::size_t columns, std::size_t depth, const std::uint8_t* numbers,
                         std::size_t stride, const Sink& sink) {
    std::size_t column = 0;
    for (; column + Columns <= columns; column += Columns) {
      tile<Rows, Columns>(bytes + column * depth * kVector, depth, numbers, stride,
                          [&](int r, int c, Float v) { sink(r, column + static_cast<std::size_t>(c), v); });
    }
    if constexpr (Columns > 1) {
      if (column < columns) {
        columns_of<Rows, Columns / 2>(bytes + column * depth * kVector, columns - column, depth, numbers, stride,
                                      [&](int r, std::size_t c, Float v) { sink(r, column + c, v); });
      }
    }
  }

  // sink(row, column of kLanes, sums)
  template <class Sink>
  static void run(const std::uint8_t* bytes, std::size_t columns, std::size_t depth, const std::uint8_t* numbers,
                      std::size_t stride, std::size_t count, const Sink& sink) {
    for (std::size_t row = 0; row < count;) {
      const std::size_t left = count - row;
      const std::size_t rows = left >= 7 || left == 4 ? 4 : (left > 4 ? 3 : left);
      const std::uint8_t* const from = numbers + row * stride;
      const auto put = [&](int r, std::size_t column, Float v) { sink(row + static_cast<std::size_t>(r), column, v); };
      switch (rows) {
        case 1: columns_of<1, 4>(bytes, columns, depth, from, stride, put); break;
        case 2: columns_of<2, P::kColumns>(bytes, columns, depth, from, stride, put); break;
        case 3: columns_of<3, 2>(bytes, columns, depth, from, stride, put); break;
        default: columns_of<4, 2>(bytes, columns, depth, from, stride, put);
      }
      row += rows;
    }
  }
};

}  // namespace
}  // namespace graphrot
