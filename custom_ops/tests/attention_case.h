// A call of the whole operator with everything in buffers of its own, and its definition in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "common/scratch.h"
#include "tests/parallel.h"
#include "tests/transforms.h"

namespace graphrot::test {

struct AttentionShape {
  std::size_t kv_heads = 2, group = 3, head_size = 64;
  int bits = 4;
  std::size_t batch = 1, tokens = 1, past_slots = 0;
  std::vector<std::int32_t> last_slots = {};  // empty: all of the past, then the new ones
  std::size_t total = 0;                      // 0: as many as are used
  bool causal = true;
  std::int64_t window = -1;
  float softcap = 0;
  std::size_t rotation_order = 1;  // 0: no rotation
  bool masked = false, mask_by_head = false, mask_by_query = false;
  std::uint64_t seed = 1;

  std::size_t heads() const { return kv_heads * group; }
  CacheFormat format() const { return {head_size, bits}; }
  std::size_t row() const { return row_bytes(format()); }
  std::size_t slots() const {
    const std::size_t used = static_cast<std::size_t>(*std::max_element(lasts().begin(), lasts().end()) + 1);
    return std::max(past_slots, total != 0 ? total : used);
  }
  const std::vector<std::int32_t>& lasts() const {
    filled = last_slots;
    if (filled.empty()) filled.assign(batch, static_cast<std::int32_t>(past_slots + tokens) - 1);
    return filled;
  }
  std::size_t start(std::size_t b) const {
    const auto used = static_cast<std::size_t>(lasts()[b] + 1);
    return used > tokens ? used - tokens : 0;
  }
  AttentionForm form() const {
    return {heads(), kv_heads, format(), 1.0f / std::sqrt(static_cast<float>(head_size)), softcap, window, causal};
  }
  std::unique_ptr<HadamardTransform> rotation() const {
    if (rotation_order == 0) return nullptr;
    return std::make_unique<HadamardTransform>(static_cast<std::int64_t>(head_size), hadamard(rotation_order),
                                               static_cast<std::int64_t>(rotation_order), rotation_scale());
  }
  float rotation_scale() const { return 1.0f / std::sqrt(static_cast<float>(head_size)); }

  mutable std::vector<std::int32_t> filled = {};
};

// Rows of random numbers, by the path for every machine.
inline std::vector<std::uint8_t> random_rows(const CacheFormat& format, std::size_t count, Random& random) {
  std::vector<std::uint8_t> rows(count * row_bytes(format));
  std::vector<float> z(format.head_size);
  for (std::size_t i = 0; i < count; ++i) {
    for (float& value : z) value = static_cast<float>(random.next());
    cache_scalar().store(format, z.data(), rows.data() + i * row_bytes(format));
  }
  return rows;
}

template <class T>
struct AttentionCase {
  AttentionShape shape;
  std::vector<T> query, key, value, output;
  std::vector<std::uint8_t> past_key, past_value, present_key, present_value;
  std::vector<float> mask;
  AttentionCall call{};

  explicit AttentionCase(const AttentionShape& s) : shape(s) {
    Random random(s.seed);
    const auto fill = [&](std::vector<T>& to, std::size_t heads) {
      to.resize(s.batch * s.tokens * heads * s.head_size);
      for (T& element : to) from_float(static_cast<float>(random.next()), &element);
    };
    fill(query, s.heads());
    fill(key, s.kv_heads);
    fill(value, s.kv_heads);
    output.resize(query.size());
    past_key = random_rows(s.format(), s.batch * s.kv_heads * s.past_slots, random);
    past_value = random_rows(s.format(), s.batch * s.kv_heads * s.past_slots, random);
    const std::size_t bytes = s.batch * s.kv_heads * s.slots() * s.row();
    present_key.assign(bytes, 0xee);
    present_value.assign(bytes, 0xee);
    if (s.masked) {
      mask.resize(s.batch * (s.mask_by_head ? s.heads() : 1) * (s.mask_by_query ? s.tokens : 1) * used());
      for (float& each : mask) each = random.below(4) == 0 ? -3e38f : static_cast<float>(random.next());
    }
    refresh();
  }

  std::size_t used() const {
    std::size_t most = 0;
    for (std::size_t b = 0; b < shape.batch; ++b) most = std::max(most, shape.start(b) + shape.tokens);
    return most;
  }

  void refresh() {
    call.batch = shape.batch;
    call.tokens = shape.tokens;
    call.query = query.data();
    call.key = key.data();
    call.value = value.data();
    call.past_slots = shape.past_slots;
    call.slots = shape.slots();
    call.past_key = past_key.data();
    call.past_value = past_value.data();
    call.present_key = present_key.data();
    call.present_value = present_value.data();
    call.last_slots = shape.lasts().data();
    call.output = output.data();
    const std::size_t by_query = shape.mask_by_query ? used() : 0, queries = shape.mask_by_query ? shape.tokens : 1;
    const std::size_t by_head = shape.mask_by_head ? used() * queries : 0,
                      heads = shape.mask_by_head ? shape.heads() : 1;
    call.mask = {mask.empty() ? nullptr : mask.data(), used() * queries * heads, by_head, by_query, used()};
  }

  // Past and present are one.
  void in_place() {
    past_key.swap(present_key);
    past_value.swap(present_value);
    refresh();
    call.past_key = call.present_key = past_key.data();
    call.past_value = call.present_value = past_value.data();
  }

  template <class Parallel>
  void run(Isa isa, const Parallel& parallel) {
    ScratchPool pool;
    check_attention_call(call);
    Attention(shape.form(), shape.rotation(), Kind<T>::element, isa).run(call, pool, parallel);
  }
  void run(Isa isa) { run(isa, in_order); }
};

inline std::vector<double> stored_row(const CacheFormat& format, const std::uint8_t* row) {
  const std::size_t bytes = code_bytes(format), size = format.head_size;
  const auto number = [&](std::size_t at) {
    return static_cast<double>(to_float(Half{static_cast<std::uint16_t>(row[at] | row[at + 1] << 8)}));
  };
  const double step = number(bytes), base = number(bytes + 2);
  std::vector<double> values(size);
  for (std::size_t i = 0; i < size; ++i) {
    const unsigned code = format.bits == 8 ? row[i] : i < bytes ? row[i] & 15u : row[i - bytes] >> 4u;
    values[i] = base + step * code;
  }
  return values;
}

struct Expected {
  std::vector<double> output;
  double largest = 0;  // of values that were seen
  double spread = 0;   // of a score, by rounding a query to whole numbers: a bound for nearly all
};

// By the stored rows of the present.
template <class T>
Expected expected(const AttentionCase<T>& c) {
  const AttentionShape& s = c.shape;
  Expected result;
  const AttentionForm form = s.form();
  for (std::size_t b = 0; b < s.batch; ++b) {
    const std::size_t end = s.start(b) + s.tokens;
    std::vector<std::vector<double>> keys, values;
    for (std::size_t h = 0; h < s.kv_heads; ++h) {
      for (std::size_t j = 0; j < end; ++j) {
        const std::size_t place = ((b * s.kv_heads + h) * s.slots() + j) * s.row();
        keys.push_back(stored_row(s.format(), c.present_key.data() + place));
        values.push_back(stored_row(s.format(), c.present_value.data() + place));
      }
    }
    for (std::size_t i = 0; i < s.tokens; ++i) {
      for (std::size_t h = 0; h < s.heads(); ++h) {
        std::vector<double> q(s.head_size);
        double peak = 0;
        for (std::size_t d = 0; d < s.head_size; ++d) {
          q[d] = static_cast<double>(to_float(c.query[((b * s.tokens + i) * s.heads() + h) * s.head_size + d]));
        }
        if (s.rotation_order != 0) {
          q = transformed(q, hadamard(s.rotation_order), s.rotation_order, s.head_size / s.rotation_order,
                          static_cast<double>(s.rotation_scale()));
        }
        for (const double x : q) peak = std::fmax(peak, std::fabs(x));
        const std::size_t own = s.start(b) + i;
        std::vector<double> scores;
        std::vector<std::size_t> seen;
        for (std::size_t j = 0; j < end; ++j) {
          if (s.causal && j > own) continue;
          if (s.window >= 0 && static_cast<std::int64_t>(j) <= static_cast<std::int64_t>(own) - s.window) continue;
          double added = 0;
          if (c.call.mask.data != nullptr) {
            const AttentionMask& m = c.call.mask;
            added = static_cast<double>(m.data[b * m.by_row + h * m.by_head + i * m.by_query + j]);
            if (!(added > -1e30)) continue;
          }
          const std::vector<double>& k = keys[h / s.group * end + j];
          double score = 0, norm = 0;
          for (std::size_t d = 0; d < s.head_size; ++d) {
            score += q[d] * k[d];
            norm += k[d] * k[d];
          }
          score *= static_cast<double>(form.score_scale);
          const double cap = static_cast<double>(s.softcap);
          if (cap > 0) score = cap * std::tanh(score / cap);
          scores.push_back(score + added);
          seen.push_back(j);
          result.spread =
              std::fmax(result.spread, peak / 32639 * std::sqrt(norm) * static_cast<double>(form.score_scale));
        }
        double top = -std::numeric_limits<double>::infinity(), total = 0;
        for (const double score : scores) top = score > top || std::isnan(score) ? score : top;
        std::vector<double> out(s.head_size, 0.0);
        for (std::size_t n = 0; n < seen.size(); ++n) {
          const double weight = std::exp(scores[n] - top);
          total += weight;
          const std::vector<double>& v = values[h / s.group * end + seen[n]];
          for (std::size_t d = 0; d < s.head_size; ++d) {
            out[d] += weight * v[d];
            if (v[d] == v[d]) result.largest = std::fmax(result.largest, std::fabs(v[d]));
          }
        }
        for (double& x : out) x = seen.empty() ? 0.0 : x / total;
        result.output.insert(result.output.end(), out.begin(), out.end());
      }
    }
  }
  return result;
}

}  // namespace graphrot::test
