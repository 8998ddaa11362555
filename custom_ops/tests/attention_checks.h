// What a call of attention must leave behind, whoever ran it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/attention_case.h"
#include "tests/check.h"

namespace graphrot::test {

inline std::string words(const AttentionShape& s) {
  return "heads " + std::to_string(s.kv_heads) + "/" + std::to_string(s.group) + "/" + std::to_string(s.head_size) +
         ", " + std::to_string(s.bits) + " bits, batch " + std::to_string(s.batch) + ", tokens " +
         std::to_string(s.tokens) + ", past " + std::to_string(s.past_slots);
}

// Against the definition: within so much of the largest value, and so many times what rounded queries cost a score.
template <class T>
void check_values(const char* who, const AttentionCase<T>& c, double relative, double spreads) {
  const Expected wanted = expected(c);
  const double tolerance = wanted.largest * (relative + spreads * wanted.spread + 0.5 * Kind<T>::rounding);
  std::size_t wrong = 0;
  double most = 0;
  for (std::size_t i = 0; i < c.output.size(); ++i) {
    const double found = static_cast<double>(to_float(c.output[i])), error = std::fabs(found - wanted.output[i]);
    if (std::isnan(wanted.output[i]) ? !std::isnan(found) : !(error <= tolerance)) ++wrong;
    most = std::fmax(most, error);
  }
  EXPECT(wrong == 0, "%s, %s: %zu of %zu values, %g above %g", who, words(c.shape).c_str(), wrong, c.output.size(),
         most, tolerance);
}

// Rows outside the new ones are those of the past, then zeros; new ones are the rows of rotated keys, and of values.
// `rotate` changes one head's floats in place.
template <class T, class Rotate>
void check_cache(const char* who, const AttentionCase<T>& c, const Rotate& rotate) {
  const AttentionShape& s = c.shape;
  const std::size_t row = s.row();
  for (std::size_t place = 0; place < s.batch * s.kv_heads; ++place) {
    const std::size_t b = place / s.kv_heads, h = place % s.kv_heads, start = s.start(b);
    std::size_t wrong = 0;
    for (std::size_t j = 0; j < s.slots(); ++j) {
      std::vector<std::uint8_t> key(row, 0), value(row, 0);
      if (j >= start && j < start + s.tokens) {
        std::vector<float> z(s.head_size), v(s.head_size);
        const std::size_t from = ((b * s.tokens + j - start) * s.kv_heads + h) * s.head_size;
        for (std::size_t d = 0; d < s.head_size; ++d) {
          z[d] = to_float(c.key[from + d]);
          v[d] = to_float(c.value[from + d]);
        }
        rotate(z);
        cache_scalar().store(s.format(), z.data(), key.data());
        cache_scalar().store(s.format(), v.data(), value.data());
      } else if (j < s.past_slots) {
        const std::size_t from = (place * s.past_slots + j) * row;
        key.assign(c.past_key.begin() + static_cast<std::ptrdiff_t>(from),
                   c.past_key.begin() + static_cast<std::ptrdiff_t>(from + row));
        value.assign(c.past_value.begin() + static_cast<std::ptrdiff_t>(from),
                     c.past_value.begin() + static_cast<std::ptrdiff_t>(from + row));
      }
      const std::size_t at = (place * s.slots() + j) * row;
      if (std::memcmp(key.data(), c.present_key.data() + at, row) != 0) ++wrong;
      if (std::memcmp(value.data(), c.present_value.data() + at, row) != 0) ++wrong;
    }
    EXPECT(wrong == 0, "%s, %s: %zu rows of head %zu", who, words(s).c_str(), wrong, place);
  }
}

// A key with NaN or a value with infinity, which only the heads and tokens that see it may spoil. Of `s` nothing is
// rotated, and there are eight tokens. `run` runs a case, `check` looks at its cache.
template <class Run, class Check>
void check_spoiled(const char* who, const AttentionShape& s, const Run& run, const Check& check) {
  for (const bool in_key : {true, false}) {
    AttentionCase<float> c(s);
    std::vector<float>& from = in_key ? c.key : c.value;
    from[(4 * s.kv_heads + 1) * s.head_size + 5] = in_key ? std::nanf("") : std::numeric_limits<float>::infinity();
    run(c);
    check(c);
    for (std::size_t i = 0; i < c.output.size(); ++i) {
      const std::size_t token = i / (s.heads() * s.head_size), head = i / s.head_size % s.heads();
      EXPECT(std::isnan(c.output[i]) == (token >= 4 && head >= s.group), "%s: token %zu, head %zu", who, token, head);
    }
  }
}

}  // namespace graphrot::test
