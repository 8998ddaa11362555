// Rows of the cache on every path, to the bit, against the definition: all widths around the vectors' edges, and rows
// that are constant, zero, huge, tiny or not finite.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "attention/cache.h"
#include "tests/check.h"
#include "tests/transforms.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Half saturated(float value) {
  Half half{};
  from_float(std::fmin(std::fmax(value, -65504.0f), 65504.0f), &half);
  return half;
}

std::vector<std::uint8_t> expected(const CacheFormat& format, const std::vector<float>& z) {
  const std::size_t size = format.head_size;
  const float levels = format.bits == 4 ? 15.0f : 255.0f;
  bool finite = true;
  float low = kInfinity, high = -kInfinity;
  for (const float value : z) {
    finite = finite && std::isfinite(value);
    low = std::fmin(low, value);
    high = std::fmax(high, value);
  }
  Half step{0}, base{0x7e00};
  std::vector<unsigned> codes(size, 0);
  if (finite) {
    step = saturated((high - low) / levels);
    base = saturated(low == 0.0f ? 0.0f : low);
    for (std::size_t i = 0; i < size && step.bits != 0; ++i) {
      const float quotient = (z[i] - to_float(base)) / to_float(step);
      codes[i] = static_cast<unsigned>(std::fmin(std::fmax(std::nearbyint(quotient), 0.0f), levels));
    }
  }
  std::vector<std::uint8_t> row;
  const std::size_t half = size / 2;
  for (std::size_t i = 0; i < (format.bits == 4 ? half : size); ++i) {
    row.push_back(static_cast<std::uint8_t>(format.bits == 4 ? codes[i] | codes[i + half] << 4 : codes[i]));
  }
  for (const Half end : {step, base}) {
    row.push_back(static_cast<std::uint8_t>(end.bits & 0xff));
    row.push_back(static_cast<std::uint8_t>(end.bits >> 8));
  }
  return row;
}

void check_row(Isa isa, const CacheFormat& format, const std::vector<float>& z, const char* what) {
  const std::vector<std::uint8_t> wanted = expected(format, z);
  EXPECT(wanted.size() == row_bytes(format), "bytes of a row");
  std::vector<std::uint8_t> row(wanted.size() + 8, 0x5a);
  cache_kernels(isa).store(format, z.data(), row.data());
  EXPECT(std::memcmp(row.data(), wanted.data(), wanted.size()) == 0, "%s, %d bits, %zu channels: %s", isa_name(isa),
         format.bits, format.head_size, what);
  for (std::size_t i = wanted.size(); i < row.size(); ++i) EXPECT(row[i] == 0x5a, "%s: bytes behind the row", what);
}

void check_rows(Isa isa) {
  for (const std::size_t size : {2, 4, 6, 14, 16, 18, 20, 24, 30, 32, 40, 64, 80, 96, 128, 256}) {
    for (const int bits : {4, 8}) {
      const CacheFormat format{size, bits};
      Random random(size * 2 + static_cast<std::size_t>(bits));
      std::vector<float> z(size);
      const auto fill = [&](double scale, double shift) {
        for (float& value : z) value = static_cast<float>(random.next() * scale + shift);
      };
      for (int turn = 0; turn < 8; ++turn) {
        fill(1.0, turn - 4.0);
        check_row(isa, format, z, "random");
      }
      for (const double scale : {1e-9, 1e-6, 1e-3, 1e3, 1e5, 1e30}) {
        fill(scale, 0);
        check_row(isa, format, z, "another size");
      }
      fill(0, 0);
      check_row(isa, format, z, "zero");
      z[size - 1] = -0.0f;
      check_row(isa, format, z, "negative zero");
      fill(0, 3.3);
      check_row(isa, format, z, "constant");
      for (std::size_t i = 0; i < size; ++i) z[i] = static_cast<float>(i % 16) + 0.5f * static_cast<float>(i % 2);
      z[0] = 0.0f;
      z[size - 1] = bits == 4 ? 15.0f : 255.0f;
      check_row(isa, format, z, "ties");
      z[0] = -3.4e38f;
      z[size - 1] = 3.4e38f;
      check_row(isa, format, z, "a range beyond the largest float");
      for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
        fill(1.0, 0);
        z[size / 3] = bad;
        check_row(isa, format, z, "not finite");
      }
    }
  }
}

template <class T>
void check_elements(Isa isa) {
  const CacheKernels& kernels = cache_kernels(isa);
  for (std::size_t count = 1; count < 40; ++count) {
    std::vector<T> from(count), back(count);
    std::vector<float> floats(count);
    Random random(count);
    for (T& value : from) from_float(static_cast<float>(random.next()), &value);
    kernels.load[static_cast<int>(Kind<T>::element)](from.data(), floats.data(), count);
    for (std::size_t i = 0; i < count; ++i) EXPECT(floats[i] == to_float(from[i]), "%s: element %zu", isa_name(isa), i);
    kernels.save[static_cast<int>(Kind<T>::element)](floats.data(), back.data(), count);
    EXPECT(std::memcmp(from.data(), back.data(), count * sizeof(T)) == 0, "%s: %zu elements back", isa_name(isa),
           count);
  }
}

}  // namespace

int main() {
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) {
      std::printf("NOT RUN: cache, %s\n", isa_name(isa));
      continue;
    }
    check_rows(isa);
    check_elements<float>(isa);
    check_elements<Half>(isa);
    check_elements<BFloat16>(isa);
  }
  return test::failures == 0 ? 0 : 1;
}
