// The products of attend_panel.h for at most kFewRows queries: what is unpacked is multiplied at once, never stored.
// Over a policy P (see there) with kFewRows > 0, whose vectors have a lane for each byte of a piece; in an unnamed
// namespace like it.
//
// Of 4-bit values, the high half of a byte is a code times 16, and is not shifted: its exact sums are divided by 16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/attend_product.h"
#include "attention/attend_unpack.h"
#include "hadamard/mix.h"

namespace graphrot {
namespace {

template <class P, int Halves>
struct FewRows {
  using Int = typename P::Int;
  using Acc = typename P::Acc;
  using Block = typename Unpacking<P>::Block;
  using Next = typename Unpacking<P>::Next;
  static constexpr std::size_t kLanes = P::kLanes, kRunsOfPiece = Halves * kPieceBytes / kRun;
  static_assert(kLanes == kPieceBytes, "a piece of four rows is one vector");

  const Unpacking<P>& unpacking;

  // Calls body with the number of queries as a type.
  template <int Most, class Body>
  GRAPHROT_INLINE static void by_rows(std::size_t count, const Body& body) {
    if constexpr (Most > 1) {
      if (count < Most) return by_rows<Most - 1>(count, body);
    }
    body(std::integral_constant<int, Most>());
  }

  // sink(row, group of kLanes slots, sums); `numbers` of each row follow the one before after `stride` bytes. A number
  // that is loaded serves two groups.
  template <int Rows, class Sink>
  void keys(const Block& block, const Next& next, const std::uint8_t* numbers, std::size_t stride,
            const Sink& sink) const {
    const std::size_t row_bytes = unpacking.problem.row_bytes, part = next.part_of(kBlockSlots / kLanes / 2);
    for (int in_tail = 0; in_tail < 2; ++in_tail) {
      const std::uint8_t* from = in_tail ? block.last : block.rows;
      std::size_t slot = in_tail ? block.whole : 0;
      const std::size_t until = in_tail ? block.count : block.whole;
      for (; slot + 2 * kLanes <= until; slot += 2 * kLanes, from += 2 * kLanes * row_bytes) {
        next.ask(slot / kLanes / 2, part);
        keys_of<Rows, 2>(from, slot / kLanes, numbers, stride, sink);
      }
      if (slot < until) keys_of<Rows, 1>(from, slot / kLanes, numbers, stride, sink);
    }
  }

  // sink(row, vector of channels, sums)
  template <int Rows, class Sink>
  void values(const Block& block, const Next& next, const std::uint8_t* numbers, std::size_t stride,
              const Sink& sink) const {
    constexpr std::size_t kPieces = Rows * Halves * P::kAccVectors <= 12 ? 2 : 1;
    const std::size_t pieces = unpacking.problem.pieces;
    std::size_t piece = 0;
    if constexpr (kPieces == 2) {
      for (; (piece + 2) * kPieceBytes <= unpacking.problem.code_bytes; piece += 2) {
        values_of<Rows, 2>(block, next, piece, numbers, stride, sink);
      }
    }
    for (; piece < pieces; ++piece) values_of<Rows, 1>(block, next, piece, numbers, stride, sink);
  }

 private:
  template <int Many, int Rows>
  GRAPHROT_INLINE static void clear(Acc (&acc)[Many][Rows]) {
    for (int i = 0; i < Many; ++i) {
      for (int r = 0; r < Rows; ++r) acc[i][r] = Acc::zero();
    }
  }

  template <int Rows, int Groups, class Sink>
  GRAPHROT_INLINE void keys_of(const std::uint8_t* from, std::size_t group, const std::uint8_t* number,
                               std::size_t stride, const Sink& sink) const {
    const std::size_t row_bytes = unpacking.problem.row_bytes, pieces = unpacking.problem.pieces;
    Acc acc[Groups][Rows];
    clear(acc);
    for (std::size_t piece = 0; piece < pieces; ++piece, number += kRunsOfPiece * kRunBytes) {
      const std::uint8_t* const at = from + unpacking.offset_of(piece);
      Int v[Groups][4];
      for (std::size_t g = 0; g < Groups; ++g) P::columns(at + g * kLanes * row_bytes, row_bytes, v[g]);
      add_columns<0>(acc, v, number, stride);
    }
    for (int g = 0; g < Groups; ++g) {
      for (int r = 0; r < Rows; ++r) sink(r, group + static_cast<std::size_t>(g), acc[g][r].total());
    }
  }

  // Columns First and on, of four; a loop would keep them in memory.
  template <int First, int Rows, int Groups>
  GRAPHROT_INLINE static void add_columns(Acc (&acc)[Groups][Rows], const Int (&v)[Groups][4],
                                          const std::uint8_t* numbers, std::size_t stride) {
    if constexpr (First < 4) {
      for (int h = 0; h < Halves; ++h) {
        typename P::Code code[Groups];
        for (int g = 0; g < Groups; ++g) {
          const Int each = v[g][First];
          code[g] = P::Code::of(Halves == 1 ? each : (h == 0 ? P::low_codes(each) : P::high_codes(each)));
        }
        for (int r = 0; r < Rows; ++r) {
          const auto number = P::Number::load(numbers + static_cast<std::size_t>(r) * stride +
                                              static_cast<std::size_t>(h) * kRunBytes, First);
          for (int g = 0; g < Groups; ++g) acc[g][r].add(code[g], number);
        }
      }
      add_columns<First + 1>(acc, v, numbers, stride);
    }
  }

  template <int Rows, int Pieces, class Sink>
  void values_of(const Block& block, const Next& next, std::size_t piece, const std::uint8_t* numbers,
                 std::size_t stride, const Sink& sink) const {
    const std::size_t row_bytes = unpacking.problem.row_bytes, offset = unpacking.offset_of(piece);
    const std::size_t part = Pieces * next.part_of(unpacking.problem.pieces * (kBlockSlots / kRun));
    Acc acc[Pieces][Halves][Rows];
    for (int p = 0; p < Pieces; ++p) clear(acc[p]);
    const std::uint8_t* number = numbers;
    for (int in_tail = 0; in_tail < 2; ++in_tail) {
      const std::uint8_t* from = (in_tail ? block.last : block.rows) + offset;
      const std::size_t until = in_tail ? block.count : block.whole;
      for (std::size_t slot = in_tail ? block.whole : 0; slot < until; slot += kRun, number += kRunBytes) {
        next.ask(piece / Pieces * (kBlockSlots / kRun) + slot / kRun, part);
        for (int four = 0; four < 4; ++four, from += 4 * row_bytes) {
          Int wide[Pieces];
          P::across(from, row_bytes, wide);
          typename P::Code code[Pieces][Halves];
          for (int p = 0; p < Pieces; ++p) {
            code[p][0] = P::Code::of(Halves == 1 ? wide[p] : P::low_codes(wide[p]));
            if constexpr (Halves == 2) code[p][1] = P::Code::of(P::high_codes_in_place(wide[p]));
          }
          for (int r = 0; r < Rows; ++r) {
            const auto by = P::Number::load(number + static_cast<std::size_t>(r) * stride, four);
            for (int p = 0; p < Pieces; ++p) {
              for (int h = 0; h < Halves; ++h) acc[p][h][r].add(code[p][h], by);
            }
          }
        }
      }
    }
    for (int p = 0; p < Pieces; ++p) {
      for (int h = 0; h < Halves; ++h) {
        for (int r = 0; r < Rows; ++r) {
          const auto sums = acc[p][h][r].total();
          sink(r, (piece + static_cast<std::size_t>(p)) * Halves + static_cast<std::size_t>(h),
               h == 0 ? sums : sums * P::set(0.0625f));
        }
      }
    }
  }
};

}  // namespace
}  // namespace graphrot
