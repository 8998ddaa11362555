// Rows of activations that are zero, huge, tiny or not finite, and what whoever quantizes them must make of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "matmul/rows.h"
#include "tests/check.h"

namespace graphrot::test {

inline constexpr std::size_t kSpecialRows = 9;

// Of kSpecialRows rows of `k`: one is zero, one huge, one tiny, and two have one outlier. Before they are rounded to the
// element type, which `round` does.
template <class Round>
std::vector<double> special_rows(std::vector<double> x, std::size_t k, double huge, const Round& round) {
  for (std::size_t i = 0; i < k; ++i) {
    x[1 * k + i] = 0;
    x[7 * k + i] = huge;
    x[8 * k + i] *= 1e-7;
  }
  x = round(x);
  x[3 * k + k - 1] = huge;  // one outlier
  x[6 * k + 3] = -huge;
  return x;
}

// The same, with three rows that are not finite.
inline std::vector<double> not_finite(std::vector<double> x, std::size_t k) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  x[2 * k + 5] = std::nan("");
  x[4 * k + k - 1] = kInfinity;
  x[5 * k] = -kInfinity;
  return x;
}

// `got` with the rows that are not finite, `without` before; both have codes of `k` for each row, and scales.
template <class Result>
void check_special_rows(const std::string& who, const Result& got, const Result& without, std::size_t k) {
  for (std::size_t row = 0; row < kSpecialRows; ++row) {
    const bool bad = row == 2 || row == 4 || row == 5;
    EXPECT(std::isnan(got.scales[row]) == bad, "%s, row %zu: scale %g", who.c_str(), row,
           static_cast<double>(got.scales[row]));
    for (std::size_t i = row * k; i < (row + 1) * k; ++i) {
      EXPECT(got.codes[i] == (bad ? 0 : without.codes[i]), "%s, row %zu: codes", who.c_str(), row);
    }
  }
  EXPECT(static_cast<double>(got.scales[1]) == static_cast<double>(kRowEpsilon / 127),
         "%s: a row of zeros has the least scale", who.c_str());
  EXPECT(got.codes[k] == 0, "%s: a row of zeros has codes of zero", who.c_str());
}

}  // namespace graphrot::test
