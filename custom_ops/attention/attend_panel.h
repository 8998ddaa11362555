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
#include "attention/attend_few.h"
#include "attention/attend_product.h"
#include "attention/attend_unpack.h"

namespace graphrot {
namespace {

constexpr float kLevels = 32639.0f;  // 127 * 256 + 127: two signed bytes
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNone = -kInfinity;
constexpr std::size_t kBlockBytes = 2 * kBlockSlots;  // of one row's weights
constexpr float kNanFloat = std::numeric_limits<float>::quiet_NaN();
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
// 2^r for |r| <= 1/2, within 8e-8 of it (a minimax polynomial, the highest power first).
constexpr int kTerms = 6;
constexpr float kPower[kTerms] = {0.0013276472f, 0.00967554133f, 0.0555071327f,
                                  0.240221197f,  0.693146967f,   1.00000007f};
constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds, and the low bits are the whole number
constexpr float kLeast = -86.0f;       // of exponents: no product of a weight with a step is subnormal

// What is kept of each query.
struct Row {
  float scale, base;        // score = scale * step of the slot * product + base * base of the slot
  float largest, total;     // so far; scores are exponents of two
  float keep, factor, add;  // of this block: sums = keep * sums + factor * product + add
  float inverse;            // of the factor
};
static_assert(sizeof(Row) == kRowNumbers * sizeof(float), "room for it");

template <class P>
struct Panel {
  using Float = typename P::Float;
  static constexpr std::size_t kLanes = P::kLanes;

  const AttendProblem& problem;
  const AttendTask& task;
  Unpacking<P> unpacking;
  std::uint8_t *codes, *queries, *weights;
  float *scores, *sums, *scales;
  Row* rows;
  std::size_t halves;

  Panel(const AttendProblem& p, const AttendTask& t, void* scratch)
      : problem(p), task(t), unpacking{p, t, nullptr, nullptr} {
    auto* const memory = static_cast<std::uint8_t*>(scratch);
    codes = memory + p.scratch.codes;
    queries = memory + p.scratch.queries;
    weights = memory + p.scratch.weights;
    unpacking.codes = codes;
    unpacking.tail = memory + p.scratch.tail;
    scores = reinterpret_cast<float*>(memory + p.scratch.scores);
    sums = reinterpret_cast<float*>(memory + p.scratch.sums);
    scales = reinterpret_cast<float*>(memory + p.scratch.scales);
    rows = reinterpret_cast<Row*>(memory + p.scratch.rows);
    halves = p.format.bits == 4 ? 2 : 1;
  }

  // ---- queries

  // The channels of one query in their order, then as whole numbers. `ordered` has room for all channels.
  void round_query(std::size_t q, float* ordered) {
    const float* const from = task.queries[q].query;
    float* to = ordered;
    for (std::size_t piece = 0; piece < problem.pieces; ++piece) {
      const std::size_t offset = unpacking.offset_of(piece), doubled = piece * kPieceBytes - offset;
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
    const float unit = problem.softcap > 0.0f ? 2.0f * kLog2E / problem.softcap : kLog2E;  // of what tanh takes, or 2^x
    row.scale = (finite ? largest / kLevels : kNanFloat) * problem.score_scale * unit;
    row.base = row.scale * static_cast<float>(sum);
    row.largest = kNone;
    row.total = 0.0f;
    float* const own = sums + q * problem.channels;
    for (std::size_t i = 0; i < problem.channels; i += kLanes) P::store(own + i, P::set(0.0f));
  }

  // ---- softmax

  static Float power_of_two(Float x) {
    const Float whole = x + P::set(kWhole), rest = x - (whole - P::set(kWhole));
    Float y = P::set(kPower[0]);
    for (int i = 1; i < kTerms; ++i) y = P::multiply_add(y, rest, P::set(kPower[i]));
    return P::times_power(y, whole);
  }

  static Float weight_of(Float x) { return power_of_two(P::larger(P::set(kLeast), x)); }

  // Products of a row become scores. False where all are hidden.
  template <bool All>
  bool score(std::size_t q, std::size_t start, std::size_t count) {
    const AttendQuery& query = task.queries[q];
    Row& state = rows[q];
    float* const row = scores + q * kBlockSlots;
    const Float scale = P::set(state.scale), base = P::set(state.base);
    const bool capped = problem.softcap > 0.0f;
    const Float cap = P::set(problem.softcap * kLog2E), one = P::set(1.0f);
    Float most = P::set(kNone);
    bool any = All;
    for (std::size_t j = 0; j < count; j += kLanes) {
      const Float step = P::load(scales + j) * scale, shift = P::load(scales + kBlockSlots + j) * base;
      Float s = P::multiply_add(step, P::load(row + j), shift);
      if (capped) {  // tanh
        const Float e = power_of_two(P::larger(P::set(-30.0f), P::smaller(P::set(30.0f), s)));
        s = cap * P::divide(e - one, e + one);
      }
      if constexpr (!All) {
        typename P::Mask seen = P::between(start + j, query.first, query.last);
        if (query.mask != nullptr) {
          const Float mask = P::load_where(seen, query.mask + start + j);
          seen = P::both(seen, P::above(mask, P::set(kHidden)));
          s = P::multiply_add(mask, P::set(kLog2E), s);
        }
        s = P::choose(seen, s, P::set(kNone));
        any = any || P::any(seen);
      }
      P::store(row + j, s);
      most = P::larger(s, most);
    }
    state.inverse = P::largest(most);  // for weigh()
    return any;
  }

  // Scores become weights times the slot's step. What is hidden may be NaN.
  template <bool All>
  void weigh(std::size_t q, std::size_t count) {
    Row& state = rows[q];
    const float before = state.largest;
    if (state.inverse > before) state.largest = state.inverse;
    const float by = state.largest == kNone ? 0.0f : state.largest;  // none: all that is seen is NaN
    float* const row = scores + q * kBlockSlots;
    const float* const steps = scales + 2 * kBlockSlots;
    const Float shift = P::set(by), none = P::set(kNone);
    Float total = P::set(0.0f), add = P::set(0.0f), most = P::set(0.0f);
    for (std::size_t j = 0; j < count; j += kLanes) {
      const Float s = P::load(row + j), base = P::load(steps + kBlockSlots + j);
      Float weight = weight_of(s - shift), stepped;
      if constexpr (All) {
        stepped = weight * P::load(steps + j);
        add = P::multiply_add(weight, base, add);
      } else {
        const typename P::Mask seen = P::differs(s, none);
        weight = P::where(seen, weight);
        stepped = P::where(seen, weight * P::load(steps + j));
        add = P::multiply_add_where(seen, weight, base, add);
      }
      total = total + weight;
      most = P::larger(stepped, most);
      P::store(row + j, stepped);
    }
    state.keep = before == kNone ? 0.0f : P::first(weight_of(P::set(before - by)));
    state.total = state.total * state.keep + P::sum(total);
    state.add = P::sum(add);
    const float peak = P::largest(most);
    state.factor = peak / kLevels;
    state.inverse = peak > 0.0f ? kLevels / peak : 0.0f;
  }

  // Weights of all queries as whole numbers, in steps that go through all rows, so that one need not wait for another.
  // False where all is hidden.
  bool weigh_all(std::size_t start, std::size_t count) {
    bool any = false;
    bool seen[kMostQueries];
    const auto all = [&](std::size_t q) {
      const AttendQuery& query = task.queries[q];
      return query.first <= start && query.last >= start + count && query.mask == nullptr;
    };
    for (std::size_t q = 0; q < task.count; ++q) {
      seen[q] = all(q) ? score<true>(q, start, count) : score<false>(q, start, count);
      any = any || seen[q];
    }
    if (!any) return false;
    for (std::size_t q = 0; q < task.count; ++q) {
      if (!seen[q]) {
        rows[q].keep = 1.0f;
        rows[q].factor = rows[q].add = rows[q].inverse = 0.0f;
      } else if (all(q)) {
        weigh<true>(q, count);
      } else {
        weigh<false>(q, count);
      }
    }
    for (std::size_t q = 0; q < task.count; ++q) {
      const Float inverse = P::set(rows[q].inverse);
      const float* const row = scores + q * kBlockSlots;
      std::uint8_t* const numbers = weights + q * kBlockBytes;
      for (std::size_t j = 0; j < count; j += kRun) P::pack(row + j, inverse, numbers + 2 * j);
    }
    return true;
  }

  // ---- all of it

  // Products of a block's keys, for weigh_all().
  template <int Halves>
  void multiply_keys(const typename Unpacking<P>::Block& block, const typename Unpacking<P>::Next& next) {
    const std::size_t channels = problem.channels;
    const auto put = [this](std::size_t q, std::size_t group, Float v) {
      P::store(scores + q * kBlockSlots + group * kLanes, v);
    };
    if constexpr (P::kFewRows != 0) {
      if (task.count <= P::kFewRows) {
        const FewRows<P, Halves> few{unpacking};
        return few.template by_rows<P::kFewRows>(task.count, [&](auto rows) {
          few.template keys<decltype(rows)::value>(block, next, queries, 2 * channels, put);
        });
      }
    }
    unpacking.template unpack_keys<Halves>(block, next);
    Product<P>::run(codes, block.count / kLanes, channels / 4, queries, 2 * channels, task.count, put);
  }

  template <int Halves>
  void multiply_values(const typename Unpacking<P>::Block& block, const typename Unpacking<P>::Next& next) {
    const std::size_t channels = problem.channels;
    const auto put = [this, channels](std::size_t q, std::size_t column, Float v) {
      float* const to = sums + q * channels + column * kLanes;
      const Row& row = rows[q];
      const Float added = P::multiply_add(P::set(row.factor), v, P::set(row.add));
      P::store(to, P::multiply_add(P::set(row.keep), P::load(to), added));
    };
    if constexpr (P::kFewRows != 0) {
      if (task.count <= P::kFewRows) {
        const FewRows<P, Halves> few{unpacking};
        return few.template by_rows<P::kFewRows>(task.count, [&](auto rows) {
          few.template values<decltype(rows)::value>(block, next, weights, kBlockBytes, put);
        });
      }
    }
    unpacking.template unpack_values<Halves>(block, next);
    Product<P>::run(codes, channels / kLanes, block.count / 4, weights, kBlockBytes, task.count, put);
  }

  template <int Halves>
  void attend(std::size_t start, std::size_t count) {
    const auto keys = unpacking.block_of(task.keys + start * problem.row_bytes, count);
    unpacking.unpack_scales(keys, scales);
    multiply_keys<Halves>(keys, unpacking.next_of(task.keys, task.next_keys, start));
    const auto values = unpacking.block_of(task.values + start * problem.row_bytes, count);
    unpacking.unpack_scales(values, scales + 2 * kBlockSlots);
    if (!weigh_all(start, values.count)) return;
    multiply_values<Halves>(values, unpacking.next_of(task.values, task.next_values, start));
  }

  void finish(std::size_t q) {
    task.largest[q] = rows[q].largest * kLn2;
    task.total[q] = rows[q].total;
    const float* from = sums + q * problem.channels;
    for (std::size_t piece = 0; piece < problem.pieces; ++piece) {
      for (std::size_t half = 0; half < halves; ++half, from += kPieceBytes) {
        float* const to =
            task.sums + q * problem.format.head_size + half * problem.code_bytes + unpacking.offset_of(piece);
        for (std::size_t i = 0; i < kPieceBytes; i += kLanes) P::store(to + i, P::load(from + i));
      }
    }
  }

  void run() {
    for (std::size_t q = 0; q < task.count; ++q) round_query(q, scores);
    for (std::size_t start = task.first; start < task.last; start += kBlockSlots) {
      const std::size_t count = task.last - start < kBlockSlots ? task.last - start : kBlockSlots;
      if (halves == 2) {
        attend<2>(start, count);
      } else {
        attend<1>(start, count);
      }
    }
    for (std::size_t q = 0; q < task.count; ++q) finish(q);
  }
};

}  // namespace
}  // namespace graphrot
