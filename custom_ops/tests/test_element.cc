// Conversions of the 16-bit types, over all their values and around every rounding boundary.
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "common/element.h"
#include "tests/check.h"

using graphrot::BFloat16;
using graphrot::from_float;
using graphrot::Half;
using graphrot::to_float;

namespace {

double half_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f, fraction = bits & 0x3ff;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

void every_half_survives() {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<std::uint16_t>(bits)};
    const float value = to_float(half);
    Half back{};
    from_float(value, &back);
    if ((bits & 0x7fff) > 0x7c00) {
      EXPECT(std::isnan(value) && std::isnan(to_float(back)), "half %04x", bits);
    } else {
      EXPECT(back.bits == half.bits, "half %04x became %04x", bits, back.bits);
      if ((bits & 0x7fff) < 0x7c00) EXPECT(value == half_value(half.bits), "half %04x is %g", bits, value);
    }
  }
}

void half_rounds_to_nearest_even() {
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = half_value(bits), high = half_value(static_cast<std::uint16_t>(bits + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    const std::uint16_t even = (bits & 1) == 0 ? bits : static_cast<std::uint16_t>(bits + 1);
    const float around[3] = {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e30f)};
    const std::uint16_t expected[3] = {bits, even, static_cast<std::uint16_t>(bits + 1)};
    for (int i = 0; i < 3; ++i) {
      Half got{};
      from_float(around[i], &got);
      EXPECT(got.bits == expected[i], "%a gave %04x, not %04x", around[i], got.bits, expected[i]);
    }
  }
  Half got{};
  from_float(65519.99f, &got);
  EXPECT(got.bits == 0x7bff, "below the middle to infinity: %04x", got.bits);
  from_float(-65520.0f, &got);
  EXPECT(got.bits == 0xfc00, "at the middle to infinity: %04x", got.bits);
  from_float(std::numeric_limits<float>::infinity(), &got);
  EXPECT(got.bits == 0x7c00, "infinity: %04x", got.bits);
}

void bfloat16_rounds_to_nearest_even() {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 value{static_cast<std::uint16_t>(bits)};
    BFloat16 back{};
    from_float(to_float(value), &back);
    if ((bits & 0x7fff) > 0x7f80) {
      EXPECT(std::isnan(to_float(back)), "bfloat16 %04x", bits);
      continue;
    }
    EXPECT(back.bits == value.bits, "bfloat16 %04x became %04x", bits, back.bits);
    if ((bits & 0x7fff) >= 0x7f80) continue;
    for (const std::uint32_t tail : {0x7fffu, 0x8000u, 0x8001u}) {
      const float between = graphrot::detail::bits_float((bits << 16) | tail);
      const bool up = tail > 0x8000u || (tail == 0x8000u && (bits & 1) != 0);
      from_float(between, &back);
      EXPECT(back.bits == bits + (up ? 1 : 0), "%a gave %04x", between, back.bits);
    }
  }
}

}  // namespace

int main() {
  every_half_survives();
  half_rounds_to_nearest_even();
  bfloat16_rounds_to_nearest_even();
  return graphrot::test::failures == 0 ? 0 : 1;
}
