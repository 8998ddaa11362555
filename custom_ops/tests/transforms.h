// What tests of transforms share: factors of every construction, the definition in double, random numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "common/element.h"
#include "tests/random.h"

namespace graphrot::test {

inline constexpr double kPi = 3.14159265358979323846;

// The quadratic character of GF(q), q an odd prime power. An element is the integer whose base-p digits are the
// coefficients of a polynomial modulo a primitive one: squares are the even powers of x.
inline std::vector<int> character(std::size_t q) {
  std::size_t p = 3;
  while (q % p != 0) p += 2;
  if (p == q) {
    std::vector<int> chi(q, -1);
    for (std::size_t i = 1; i < q; ++i) chi[i * i % q] = 1;
    chi[0] = 0;
    return chi;
  }
  for (std::size_t low = 1; low < q; ++low) {  // x^k = -(the polynomial `low`)
    std::vector<int> chi(q, 0);
    std::size_t element = 1;
    for (std::size_t i = 0; i + 1 < q && chi[element] == 0; ++i) {
      chi[element] = i % 2 == 0 ? 1 : -1;
      const std::size_t lead = element / (q / p), shifted = element % (q / p) * p;
      element = 0;
      for (std::size_t digit = 1; digit < q; digit *= p) {
        element += (shifted / digit % p + lead * (p - low / digit % p)) % p * digit;
      }
    }
    bool primitive = element == 1;
    for (std::size_t i = 1; i < q; ++i) primitive = primitive && chi[i] != 0;
    if (primitive) return chi;
  }
  return {};
}

// chi(i - j) over GF(q).
inline std::vector<int> jacobsthal(std::size_t q) {
  const std::vector<int> chi = character(q);
  std::size_t p = 3;
  while (q % p != 0) p += 2;
  std::vector<int> matrix(q * q);
  for (std::size_t i = 0; i < q * q; ++i) {
    std::size_t difference = 0;
    for (std::size_t digit = 1; digit < q; digit *= p) {
      difference += (i / q / digit % p + p - i % q / digit % p) % p * digit;
    }
    matrix[i] = chi[difference];
  }
  return matrix;
}

// Order q + 1 for a prime power q = 3 mod 4: entries +-1, not symmetric.
inline std::vector<float> paley_one(std::size_t order) {
  const std::size_t q = order - 1;
  const std::vector<int> inner = jacobsthal(q);
  std::vector<float> matrix(order * order, 1.0f);
  for (std::size_t i = 0; i < q; ++i) {
    matrix[(i + 1) * order] = -1.0f;
    for (std::size_t j = 0; j < q; ++j) {
      matrix[(i + 1) * order + j + 1] = static_cast<float>(i == j ? 1 : inner[i * q + j]);
    }
  }
  return matrix;
}

// Order 2 (q + 1) for a prime power q = 1 mod 4.
inline std::vector<float> paley_two(std::size_t order) {
  const std::size_t q = order / 2 - 1;
  const std::vector<int> inner = jacobsthal(q);
  std::vector<float> matrix(order * order);
  for (std::size_t i = 0; i < order * order; ++i) {
    const std::size_t row = i / order, column = i % order, a = row / 2, b = column / 2;
    const int conference = a == b ? 0 : a == 0 || b == 0 ? 1 : inner[(a - 1) * q + b - 1];
    const bool low_row = row % 2 != 0, low_column = column % 2 != 0;
    const int diagonal = !low_row && !low_column ? 1 : -1;
    matrix[i] = static_cast<float>(a == b ? diagonal : low_row && low_column ? -conference : conference);
  }
  return matrix;
}

// Order 4 m from the first rows of four symmetric circulants.
inline std::vector<float> williamson(const std::initializer_list<const char*> rows) {
  const std::size_t m = std::strlen(*rows.begin()), order = 4 * m;
  constexpr int kBlocks[4][4] = {{1, 2, 3, 4}, {-2, 1, -4, 3}, {-3, 4, 1, -2}, {-4, -3, 2, 1}};
  std::vector<float> matrix(order * order);
  for (std::size_t i = 0; i < order * order; ++i) {
    const std::size_t row = i / order, column = i % order;
    const int block = kBlocks[row / m][column / m];
    const char* first = rows.begin()[(block < 0 ? -block : block) - 1];
    const float value = first[(column % m + m - row % m) % m] == '+' ? 1.0f : -1.0f;
    matrix[i] = block < 0 ? -value : value;
  }
  return matrix;
}

// A factor of +-1 of any order that the converter makes.
inline std::vector<float> hadamard(std::size_t order) {
  switch (order) {
    case 1: return {1.0f};
    case 28: case 36: case 52: case 76: case 100: case 124: case 148: case 924: return paley_two(order);
    case 92:
      return williamson({"+--+-+-++++++++++-+-+--", "+--++-+-+-++++-+-+-++--", "+++---++--++++--++---++",
                         "+--+--+++------+++--+--"});
    case 172:
      return williamson({"+---++--++++-+-+++-++--++-+++-+-++++--++---", "++---++++-+--+--++--------++--+--+-++++---+",
                         "+++-+-++--+-+-++++-+----+-++++-+-+--++-+-++",
                         "++-++++++----+-+--++-++-++--+-+----++++++-+"});
    default: return paley_one(order);
  }
}

inline constexpr std::size_t kHadamardOrders[] = {12,  20,  28,  36,  44,  52,  60,  68,  76,  84,  92,  100, 108,
                                                  124, 132, 140, 148, 164, 172, 180, 212, 284, 312, 344, 924};

inline std::vector<float> hartley(std::size_t order) {
  std::vector<float> matrix(order * order);
  for (std::size_t i = 0; i < order * order; ++i) {
    const double angle = 2 * kPi * static_cast<double>((i / order) * (i % order) % order) / static_cast<double>(order);
    matrix[i] = static_cast<float>(std::cos(angle) + std::sin(angle));
  }
  return matrix;
}

// Every `order * width` values of x times scale * (factor (x) Sylvester).
inline std::vector<double> transformed(const std::vector<double>& x, const std::vector<float>& factor,
                                       std::size_t order, std::size_t width, double scale) {
  const std::size_t size = order * width;
  std::vector<double> y(x.size());
  std::vector<double> part(size);
  for (std::size_t start = 0; start < x.size(); start += size) {
    for (std::size_t i = 0; i < size; ++i) part[i] = x[start + i] * scale;
    for (std::size_t stride = 1; stride < width; stride *= 2) {
      for (std::size_t block = 0; block < size; block += 2 * stride) {
        for (std::size_t i = block; i < block + stride; ++i) {
          const double low = part[i], high = part[i + stride];
          part[i] = low + high;
          part[i + stride] = low - high;
        }
      }
    }
    double* to = y.data() + start;
    for (std::size_t k = 0; k < order; ++k) {
      for (std::size_t r = 0; r < order; ++r) {
        const double f = factor[k * order + r];
        for (std::size_t j = 0; j < width; ++j) to[r * width + j] += f * part[k * width + j];
      }
    }
  }
  return y;
}

template <class T>
struct Kind;
template <>
struct Kind<float> {
  static constexpr Element element = Element::kFloat;
  static constexpr double rounding = 1.2e-7;
};
template <>
struct Kind<Half> {
  static constexpr Element element = Element::kHalf;
  static constexpr double rounding = 9.8e-4;
};
template <>
struct Kind<BFloat16> {
  static constexpr Element element = Element::kBFloat16;
  static constexpr double rounding = 7.9e-3;
};

template <class T>
std::vector<double> rounded(std::vector<double> x) {
  for (double& value : x) {
    T element{};
    from_float(static_cast<float>(value), &element);
    value = to_float(element);
  }
  return x;
}

}  // namespace graphrot::test
