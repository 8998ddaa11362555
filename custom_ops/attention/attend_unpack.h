// A block of the cache, unpacked: keys so that lanes are slots, values so that lanes are channels. Over a policy P (see
// attend_panel.h), and in an unnamed namespace like it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attend.h"
#include "hadamard/mix.h"

namespace graphrot {
namespace {

constexpr std::size_t kLine = 64;  // bytes of the first cache

template <class P>
struct Unpacking {
  using Int = typename P::Int;
  static constexpr std::size_t kLanes = P::kLanes, kVector = 4 * kLanes;
  static constexpr std::size_t kVectorsOfPiece = kPieceBytes / kLanes;

  const AttendProblem& problem;
  const AttendTask& task;
  std::uint8_t *codes, *tail;

  std::size_t offset_of(std::size_t piece) const {
    const std::size_t at = piece * kPieceBytes;
    return at + kPieceBytes <= problem.code_bytes ? at : problem.code_bytes - kPieceBytes;
  }

  // The rows of a block: those of its whole pieces of kTailSlots where they are, the others in the tail.
  struct Block {
    const std::uint8_t* rows;
    const std::uint8_t* last;
    std::size_t whole, count;  // slots: before the tail; all, a multiple of kTailSlots
  };

  Block block_of(const std::uint8_t* rows_of_block, std::size_t count) {
    const std::size_t whole = count / kTailSlots * kTailSlots,
                      padded = (count + kTailSlots - 1) / kTailSlots * kTailSlots;
    if (whole < count) {
      const std::size_t used = (count - whole) * problem.row_bytes, all = kTailSlots * problem.row_bytes;
      for (std::size_t i = 0; i < used; ++i) tail[i] = rows_of_block[whole * problem.row_bytes + i];
      for (std::size_t i = used; i < all; ++i) tail[i] = 0;
    }
    return {rows_of_block, tail, whole, padded};
  }

  // Runs body(rows, slot, until) for the slots where they are, then for those in the tail.
  template <class Body>
  GRAPHROT_INLINE static void both_parts(const Block& block, const Body& body) {
    body(block.rows, std::size_t{0}, block.whole);
    body(block.last, block.whole, block.count);
  }

  // What will be read after the block at hand: rows that other work is done beside, while they come.
  struct Next {
    const std::uint8_t* rows;
    std::size_t bytes;

    // One of so many parts; ask() wants it.
    std::size_t part_of(std::size_t parts) const { return (bytes + parts * kLine - 1) / (parts * kLine) * kLine; }

    // Asks for part `which`, all of which have `part` bytes.
    void ask(std::size_t which, std::size_t part) const {
      const std::size_t first = which * part, until = first + part < bytes ? first + part : bytes;
      for (std::size_t at = first; at < until; at += kLine) P::prefetch(rows + at);
    }
  };

  Next next_of(const std::uint8_t* rows_of_task, const std::uint8_t* after, std::size_t start) const {
    const std::size_t next = start + kBlockSlots;
    if (next >= task.last) return {after, after != nullptr ? task.next_bytes : 0};
    const std::size_t left = task.last - next;
    return {rows_of_task + next * problem.row_bytes, (left < kBlockSlots ? left : kBlockSlots) * problem.row_bytes};
  }

  // Steps, then bases. Word by word at first, which leaves the vector units to others.
  void unpack_scales(const Block& block, float* steps) const {
    const std::size_t stride = problem.row_bytes, codes_of_row = problem.code_bytes;
    std::uint8_t* const words = reinterpret_cast<std::uint8_t*>(steps + kBlockSlots);
    both_parts(block, [&](const std::uint8_t* from, std::size_t slot, std::size_t until) {
      from += codes_of_row;
      for (; slot < until; slot += 4, from += 4 * stride) {
        for (std::size_t i = 0; i < 4; ++i) P::copy_word(from + i * stride, words + 4 * (slot + i));
      }
    });
    for (std::size_t slot = 0; slot < block.count; slot += kLanes) {
      const Int both = P::load_bytes(words + 4 * slot);
      P::store(steps + slot, P::low_halves(both));
      P::store(steps + kBlockSlots + slot, P::high_halves(both));
    }
  }

  template <int Halves>
  GRAPHROT_INLINE static void put_codes(std::uint8_t* to, std::size_t to_high, Int v) {
    if constexpr (Halves == 1) {
      P::store_bytes(to, v);
    } else {
      P::store_bytes(to, P::low_codes(v));
      P::store_bytes(to + to_high, P::high_codes(v));
    }
  }

  // Keys: [kLanes slots][channels / 4][kLanes].
  template <int Halves>
  void unpack_keys(const Block& block, const Next& next) const {
    constexpr std::size_t kPiece = 4 * Halves * kVector;
    const std::size_t stride = problem.row_bytes, bytes = problem.code_bytes;
    const std::size_t part = next.part_of(kBlockSlots / kLanes);
    std::uint8_t* to = codes;
    both_parts(block, [&](const std::uint8_t* from, std::size_t slot, std::size_t until) {
      for (; slot < until; slot += kLanes, from += kLanes * stride) {
        next.ask(slot / kLanes, part);
        std::size_t at = 0;
        for (; at + 2 * kPieceBytes <= bytes; at += 2 * kPieceBytes, to += 2 * kPiece) {
          Int eight[8];
          P::columns(from + at, stride, eight);
          for (std::size_t k = 0; k < 8; ++k)
            put_codes<Halves>(to + k / 4 * kPiece + k % 4 * kVector, 4 * kVector, eight[k]);
        }
        if (at == bytes) continue;
        for (std::size_t last = at + kPieceBytes <= bytes ? at : bytes - kPieceBytes;; last = bytes - kPieceBytes) {
          Int four[4];
          P::columns(from + last, stride, four);
          for (std::size_t k = 0; k < 4; ++k) put_codes<Halves>(to + k * kVector, 4 * kVector, four[k]);
          to += kPiece;
          if (last + kPieceBytes == bytes) break;
        }
      }
    });
  }

  // Values: [channels / kLanes][count / 4][kLanes].
  template <int Halves>
  void unpack_values(const Block& block, const Next& next) const {
    constexpr std::size_t kVectors = Halves * kVectorsOfPiece;
    const std::size_t stride = problem.row_bytes, depth = block.count / 4 * kVector, pieces = problem.pieces;
    const std::size_t part = next.part_of(pieces * (kBlockSlots / 8));
    std::uint8_t* to = codes;
    std::size_t piece = 0;
    for (; (piece + 2) * kPieceBytes <= problem.code_bytes; piece += 2, to += 2 * kVectors * depth) {
      std::uint8_t* at = to;
      both_parts(block, [&](const std::uint8_t* from, std::size_t slot, std::size_t until) {
        from += piece * kPieceBytes;
        for (; slot < until; slot += 4, from += 4 * stride, at += kVector) {
          next.ask(piece * (kBlockSlots / 8) + slot / 4, part);
          Int wide[2 * kVectorsOfPiece];
          P::across(from, stride, wide);
          for (std::size_t v = 0; v < 2 * kVectorsOfPiece; ++v) {
            const std::size_t place = v / kVectorsOfPiece * kVectors + v % kVectorsOfPiece;
            put_codes<Halves>(at + place * depth, kVectorsOfPiece * depth, wide[v]);
          }
        }
      });
    }
    for (; piece < pieces; ++piece, to += kVectors * depth) {
      std::uint8_t* at = to;
      both_parts(block, [&](const std::uint8_t* from, std::size_t slot, std::size_t until) {
        from += offset_of(piece);
        for (; slot < until; slot += 4, from += 4 * stride, at += kVector) {
          Int wide[kVectorsOfPiece];
          P::across(from, stride, wide);
          for (std::size_t v = 0; v < kVectorsOfPiece; ++v)
            put_codes<Halves>(at + v * depth, kVectorsOfPiece * depth, wide[v]);
        }
      });
    }
  }
};

}  // namespace
}  // namespace graphrot
