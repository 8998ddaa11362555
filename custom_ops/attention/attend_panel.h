// Attention in fixed point, written once over a policy P of one instruction set. A block of the cache is unpacked once
// for all queries: keys so that lanes are slots, values so that lanes are channels. Scores and weighted values are then
// the same product, of bytes by 16-bit numbers, with exact sums:
//   out[row][column] = sum over k and i < 4 of number[row][4 k + i] * byte i of lane `column` of vector k
// Queries and weights are rounded to kLevels for the largest of a row.
//
// Channels are in the order in which they are unpacked: pieces of kPieceBytes bytes of a row, of each the low halves
// before the high ones. Where the last piece overlaps the one before, queries are zero, and values come out twice.
//
// P has the vectors Float and Int of kLanes lanes, Mask, and what is called here. Included by files of one instruction
// set, and so in an unnamed namespace (see hadamard/avx2.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "attention/attend.h"
#include "hadamard/mix.h"

namespace graphrot {
namespace {

constexpr float kLevels = 32639.0f;  // 127 * 256 + 127: two signed bytes
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNone = -kInfinity;
constexpr float kNanFloat = std::numeric_limits<float>::quiet_NaN();
constexpr std::size_t kRun = 16;                     // numbers that are packed together, into kRunBytes
constexpr std::size_t kRunBytes = 32;
constexpr std::size_t kBlockBytes = 2 * kBlockSlots;  // of one row's weights

// e^x = 2^n e^r: the polynomial in r, its highest power first.
constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr int kTerms = 7;
constexpr float kExponential[kTerms] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};

// What is kept of each query.
struct Row {
  float scale, base;        // score = scale * step of the slot * product + base * base of the slot
  float largest, total;     // so far
  float keep, factor, add;  // of this block: sums = keep * sums + factor * product + add
  float unused;
};
static_assert(sizeof(Row) == kRowNumbers * sizeof(float), "room for it");

template <class P>
struct Panel {
  using Float = typename P::Float;
  using Int = typename P::Int;
  static constexpr std::size_t kLanes = P::kLanes, kVector = 4 * kLanes;
  static constexpr std::size_t kVectorsOfPiece = kPieceBytes / kLanes;

  const AttendProblem& problem;
  const AttendTask& task;
  std::uint8_t *codes, *queries, *weights, *tail;
  float *scores, *sums, *scales;
  Row* rows;
  std::size_t halves;

  Panel(const AttendProblem& p, const AttendTask& t, void* scratch) : problem(p), task(t) {
    auto* const memory = static_cast<std::uint8_t*>(scratch);
    codes = memory + p.scratch.codes;
    queries = memory + p.scratch.queries;
    weights = memory + p.scratch.weights;
    tail = memory + p.scratch.tail;
    scores = reinterpret_cast<float*>(memory + p.scratch.scores);
    sums = reinterpret_cast<float*>(memory + p.scratch.sums);
    scales = reinterpret_cast<float*>(memory + p.scratch.scales);
    rows = reinterpret_cast<Row*>(memory + p.scratch.rows);
    halves = p.format.bits == 4 ? 2 : 1;
  }

  std::size_t offset_of(std::size_t piece) const {
    const std::size_t at = piece * kPieceBytes;
    return at + kPieceBytes <= problem.code_bytes ? at : problem.code_bytes - kPieceBytes;
  }

  // ---- queries

  // The channels of one query in their order, then as whole numbers. `ordered` has room for all channels.
  void round_query(std::size_t q, float* ordered) {
    const float* const from = task.queries[q].query;
    float* to = ordered;
    for (std::size_t piece = 0; piece < problem.pieces; ++piece) {
      const std::size_t offset = offset_of(piece), doubled = piece * kPieceBytes - offset;
      for (std::size_t half = 0; half < halves; ++half, to += kPieceBytes) {
        const float* const part = from + half * problem.code_bytes + offset;
        for (std::size_t i = 0; i < kPieceBytes; i += kLanes) P::store(to + i, P::load(part + i));
        for (std::size_t i = 0; i < doubled; ++i) to[i] = 0.0f;
      }
    }
    Float most = P::set(0.0f);
    for (std::size_t i = 0; i < problem.channels; i += kLanes) {
      most = P::larger_or_nan(P::absolute(P::load(ordered + i)), most);
    }
    const float largest = P::largest_or_nan(most);
    Row& row = rows[q];
    const bool finite = largest < kInfinity;
    const Float inverse = P::set(finite && largest > 0.0f ? kLevels / largest : 0.0f);
    std::int32_t sum = 0;
    std::uint8_t* const numbers = queries + q * 2 * problem.channels;
    for (std::size_t i = 0; i < problem.channels; i += kRun) {
      sum += P::pack_with_sum(ordered + i, inverse, numbers + 2 * i);
    }
    row.scale = (finite ? largest / kLevels : kNanFloat) * problem.score_scale;
    row.base = row.scale * static_cast<float>(sum);
    row.largest = kNone;
    row.total = 0.0f;
    float* const own = sums + q * problem.channels;
    for (std::size_t i = 0; i < problem.channels; i += kLanes) P::store(own + i, P::set(0.0f));
  }

  // ---- unpacking

  // Slot `slot` of a block whose rows begin at `block`; the last ones lie in the tail.
  const std::uint8_t* slot_row(const std::uint8_t* block, std::size_t slot, std::size_t whole) const {
    return slot < whole ? block + slot * problem.row_bytes : tail + (slot - whole) * problem.row_bytes;
  }

  void copy_tail(const std::uint8_t* block, std::size_t whole, std::size_t count) {
    const std::size_t used = (count - whole) * problem.row_bytes, all = kTailSlots * problem.row_bytes;
    for (std::size_t i = 0; i < used; ++i) tail[i] = block[whole * problem.row_bytes + i];
    for (std::size_t i = used; i < all; ++i) tail[i] = 0;
  }

  // Steps and bases of kLanes slots.
  void unpack_scales(const std::uint8_t* from, float* steps) {
    Int four[4];
    P::columns(from + problem.row_bytes - kPieceBytes, problem.row_bytes, four);
    P::store(steps, P::low_halves(four[3]));
    P::store(steps + kBlockSlots, P::high_halves(four[3]));
  }

  // Keys: [kLanes slots][channels / 4][kLanes].
  void unpack_keys(const std::uint8_t* block, std::size_t whole, std::size_t count) {
    std::uint8_t* to = codes;
    for (std::size_t slot = 0; slot < count; slot += kLanes) {
      const std::uint8_t* const from = slot_row(block, slot, whole);
      unpack_scales(from, scales + slot);
      for (std::size_t piece = 0; piece < problem.pieces; ++piece) {
        Int four[4];
        P::columns(from + offset_of(piece), problem.row_bytes, four);
        if (halves == 1) {
          for (int k = 0; k < 4; ++k, to += kVector) P::store_bytes(to, four[k]);
        } else {
          for (int k = 0; k < 4; ++k, to += kVector) {
            P::store_bytes(to, P::low_codes(four[k]));
            P::store_bytes(to + 4 * kVector, P::high_codes(four[k]));
          }
          to += 4 * kVector;
        }
      }
    }
  }

  // Values: [channels / kLanes][count / 4][kLanes].
  void unpack_values(const std::uint8_t* block, std::size_t whole, std::size_t count) {
    const std::size_t depth = count / 4 * kVector;
    for (std::size_t slot = 0; slot < count; slot += kLanes) {
      unpack_scales(slot_row(block, slot, whole), scales + 2 * kBlockSlots + slot);
    }
    std::uint8_t* to = codes;
    for (std::size_t piece = 0; piece < problem.pieces; ++piece) {
      const std::size_t offset = offset_of(piece);
      for (std::size_t slot = 0; slot < count; slot += 4, to += kVector) {
        Int wide[kVectorsOfPiece];
        P::across(slot_row(block, slot, whole) + offset, problem.row_bytes, wide);
        for (std::size_t v = 0; v < kVectorsOfPiece; ++v) {
          if (halves == 1) {
            P::store_bytes(to + v * depth, wide[v]);
          } else {
            P::store_bytes(to + v * depth, P::low_codes(wide[v]));
            P::store_bytes(to + (v + kVectorsOfPiece) * depth, P::high_codes(wide[v]));
          }
        }
      }
      to += (halves * kVectorsOfPiece - 1) * depth;
    }
  }

  // ---- the product

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
          code[c] = P::Code::load(bytes + static_cast<std::size_t>(c) * depth * kVector + static_cast<std::size_t>(j) * kVector);
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
  static void product(const std::uint8_t* bytes, std::size_t columns, std::size_t depth, const std::uint8_t* numbers,
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

  // ---- softmax

  // Products of a row become scores; returns whether there is one that is not hidden.
  bool score(std::size_t q, std::size_t start, std::size_t count, float* largest) {
    const AttendQuery& query = task.queries[q];
    float* const row = scores + q * kBlockSlots;
    const Float scale = P::set(rows[q].scale), base = P::set(rows[q].base);
    const Float cap = P::set(problem.softcap), inverse = P::set(problem.softcap > 0.0f ? 1.0f / problem.softcap : 0.0f);
    const bool whole = query.first <= start && query.last >= start + count && query.mask == nullptr;
    Float most = P::set(kNone);
    bool any = whole;
    for (std::size_t j = 0; j < count; j += kLanes) {
      const Float step = P::load(scales + j) * scale, shift = P::load(scales + kBlockSlots + j) * base;
      Float s = P::multiply_add(step, P::load(row + j), shift);
      if (problem.softcap > 0.0f) s = cap * tanh(s * inverse);
      if (!whole) {
        typename P::Mask seen = P::between(start + j, query.first, query.last);
        if (query.mask != nullptr) {
          const Float mask = P::load_where(seen, query.mask + start + j);
          seen = P::both(seen, P::above(mask, P::set(kHidden)));
          s = s + mask;
        }
        s = P::choose(seen, s, P::set(kNone));
        any = any || P::any(seen);
      }
      P::store(row + j, s);
      most = P::larger(s, most);
    }
    *largest = P::largest(most);
    return any;
  }

  // Scores become whole numbers: exp(score - largest) times the slot's step.
  void weigh(std::size_t q, std::size_t start, std::size_t count) {
    Row& state = rows[q];
    float largest;
    std::uint8_t* const numbers = weights + q * kBlockBytes;
    state.keep = 1.0f;
    state.factor = state.add = 0.0f;
    if (!score(q, start, count, &largest)) {
      for (std::size_t i = 0; i < 2 * count; ++i) numbers[i] = 0;
      return;
    }
    const float before = state.largest;
    if (!(largest > before)) largest = before;
    state.largest = largest;
    const float by = largest == kNone ? 0.0f : largest;  // all that is seen is NaN
    float* const row = scores + q * kBlockSlots;
    const Float shift = P::set(by), none = P::set(kNone);
    Float total = P::set(0.0f), add = P::set(0.0f), most = P::set(0.0f);
    for (std::size_t j = 0; j < count; j += kLanes) {
      const Float s = P::load(row + j);
      const typename P::Mask seen = P::differs(s, none);
      const Float weight = P::where(seen, exponential(s - shift));  // what is hidden may be NaN
      total = total + weight;
      add = P::multiply_add_where(seen, weight, P::load(scales + 3 * kBlockSlots + j), add);
      const Float stepped = P::where(seen, weight * P::load(scales + 2 * kBlockSlots + j));
      most = P::larger(stepped, most);
      P::store(row + j, stepped);
    }
    state.keep = before == kNone ? 0.0f : P::first(exponential(P::set(before - by)));
    state.total = state.total * state.keep + P::sum(total);
    state.add = P::sum(add);
    const float peak = P::largest(most);
    state.factor = peak / kLevels;
    const Float inverse = P::set(peak > 0.0f ? kLevels / peak : 0.0f);
    for (std::size_t j = 0; j < count; j += kRun) P::pack(row + j, inverse, numbers + 2 * j);
  }

  // exp(x), x <= 0 or NaN: not below exp(-60), so that no product with a step is subnormal.
  static Float exponential(Float x) {
    return P::exponential(P::larger(P::set(-60.0f), x));
  }

  static Float tanh(Float x) {
    const Float bounded = P::larger(P::set(-10.0f), P::smaller(P::set(10.0f), x));
    const Float e = P::exponential(bounded + bounded);
    return P::divide(e - P::set(1.0f), e + P::set(1.0f));
  }

  // ---- all of it

  void block(std::size_t start, std::size_t count) {
    const std::size_t whole = count / kTailSlots * kTailSlots, padded = (count + kTailSlots - 1) / kTailSlots * kTailSlots;
    const std::uint8_t* const keys = task.keys + start * problem.row_bytes;
    const std::uint8_t* const values = task.values + start * problem.row_bytes;
    if (whole < count) copy_tail(keys, whole, count);
    unpack_keys(keys, whole, padded);
    product(codes, padded / kLanes, problem.channels / 4, queries, 2 * problem.channels, task.count,
            [&](std::size_t q, std::size_t column, Float v) { P::store(scores + q * kBlockSlots + column * kLanes, v); });
    if (whole < count) copy_tail(values, whole, count);
    unpack_values(values, whole, padded);
    for (std::size_t q = 0; q < task.count; ++q) weigh(q, start, padded);
    product(codes, problem.channels / kLanes, padded / 4, weights, kBlockBytes, task.count,
            [&](std::size_t q, std::size_t column, Float v) {
              float* const to = sums + q * problem.channels + column * kLanes;
              const Row& row = rows[q];
              const Float added = P::multiply_add(P::set(row.factor), v, P::set(row.add));
              P::store(to, P::multiply_add(P::set(row.keep), P::load(to), added));
            });
  }

  void finish(std::size_t q) {
    task.largest[q] = rows[q].largest;
    task.total[q] = rows[q].total;
    const float* from = sums + q * problem.channels;
    for (std::size_t piece = 0; piece < problem.pieces; ++piece) {
      for (std::size_t half = 0; half < halves; ++half, from += kPieceBytes) {
        float* const to = task.sums + q * problem.format.head_size + half * problem.code_bytes + offset_of(piece);
        for (std::size_t i = 0; i < kPieceBytes; i += kLanes) P::store(to + i, P::load(from + i));
      }
    }
  }

  void run() {
    for (std::size_t q = 0; q < task.count; ++q) round_query(q, scores);
    for (std::size_t start = task.first; start < task.last; start += kBlockSlots) {
      block(start, task.last - start < kBlockSlots ? task.last - start : kBlockSlots);
    }
    for (std::size_t q = 0; q < task.count; ++q) finish(q);
  }
};

}  // namespace
}  // namespace graphrot
