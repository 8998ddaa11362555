// The products of attend_panel.h for at most kFewRows queries: what is unpacked is multiplied at once, and never stored.
// Over a policy P (see there) with kFewRows > 0, whose vectors have a lane for each byte of a piece; in an unnamed
// namespace like it.
//
// Of 4-bit codes, the high half of a byte is a code times 16, and is not shifted: its exact sums are divided by 16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/attend_product.h"
#include "attention/attend_unpack.h"

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

  // sink(row, group of kLanes slots, sums); `numbers` of each row follow the one before after `stride` bytes.
  template <int Rows, class Sink>
  void keys(const Block& block, const Next& next, const std::uint8_t* numbers, std::size_t stride,
            const Sink& sink) const {
    const std::size_t row_bytes = unpacking.problem.row_bytes, bytes = unpacking.problem.code_bytes;
    for (int in_tail = 0; in_tail < 2; ++in_tail) {
      const std::uint8_t* from = in_tail ? block.last : block.rows;
      const std::size_t until = in_tail ? block.count : block.whole;
      for (std::size_t slot = in_tail ? block.whole : 0; slot < until; slot += kLanes, from += kLanes * row_bytes) {
        next.ask(slot / kLanes, kBlockSlots / kLanes);
        Acc acc[Halves][Rows];
        clear(acc);
        const std::uint8_t* number = numbers;
        std::size_t at = 0;
        for (; at + 2 * kPieceBytes <= bytes; at += 2 * kPieceBytes, number += 2 * kRunsOfPiece * kRunBytes) {
          Int eight[8];
          P::columns(from + at, row_bytes, eight);
          add_columns<0>(acc, eight, number, stride);
        }
        if (at != bytes) {
          for (std::size_t last = at + kPieceBytes <= bytes ? at : bytes - kPieceBytes;; last = bytes - kPieceBytes) {
            Int four[4];
            P::columns(from + last, row_bytes, four);
            add_columns<0>(acc, four, number, stride);
            number += kRunsOfPiece * kRunBytes;
            if (last + kPieceBytes == bytes) break;
          }
        }
        for (int r = 0; r < Rows; ++r) {
          if constexpr (Halves == 2) acc[0][r].add_sixteenth(acc[1][r]);
          sink(r, slot / kLanes, acc[0][r].total());
        }
      }
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
  template <int Rows>
  GRAPHROT_INLINE static void clear(Acc (&acc)[Halves][Rows]) {
    for (int h = 0; h < Halves; ++h) {
      for (int r = 0; r < Rows; ++r) acc[h][r] = Acc::zero();
    }
  }

  // Four channels of each slot, and of high halves four others.
  template <int Rows>
  GRAPHROT_INLINE static void add_column(Acc (&acc)[Halves][Rows], Int v, const std::uint8_t* numbers,
                                         std::size_t stride, int four) {
    for (int h = 0; h < Halves; ++h) {
      const auto code = P::Code::of(Halves == 1 ? v : (h == 0 ? P::low_codes(v) : P::high_codes_in_place(v)));
      for (int r = 0; r < Rows; ++r) {
        acc[h][r].add(code, P::Number::load(numbers + static_cast<std::size_t>(r) * stride +
                                            static_cast<std::size_t>(h) * kRunBytes, four));
      }
    }
  }

  // Of columns First and on; a loop would keep them in memory.
  template <int First, int Rows, int Columns>
  GRAPHROT_INLINE static void add_columns(Acc (&acc)[Halves][Rows], const Int (&v)[Columns],
                                          const std::uint8_t* numbers, std::size_t stride) {
    if constexpr (First < Columns) {
      add_column(acc, v[First], numbers + First / 4 * kRunsOfPiece * kRunBytes, stride, First % 4);
      add_columns<First + 1>(acc, v, numbers, stride);
    }
  }

  template <int Rows, int Pieces, class Sink>
  void values_of(const Block& block, const Next& next, std::size_t piece, const std::uint8_t* numbers,
                 std::size_t stride, const Sink& sink) const {
    const std::size_t row_bytes = unpacking.problem.row_bytes, offset = unpacking.offset_of(piece),
                      pieces = unpacking.problem.pieces;
    Acc acc[Pieces][Halves][Rows];
    for (int p = 0; p < Pieces; ++p) clear(acc[p]);
    const std::uint8_t* number = numbers;
    for (int in_tail = 0; in_tail < 2; ++in_tail) {
      const std::uint8_t* from = (in_tail ? block.last : block.rows) + offset;
      const std::size_t until = in_tail ? block.count : block.whole;
      for (std::size_t slot = in_tail ? block.whole : 0; slot < until; slot += kRun, number += kRunBytes) {
        next.ask(piece * (kBlockSlots / kRun) + slot / kRun, pieces * (kBlockSlots / kRun));
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
