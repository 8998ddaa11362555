// Rows to integers on every path, against the definition in double: transforms of every order, blocks, groups, odd
// numbers of rows, beside guard values, and rows that are zero, huge or not finite.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "matmul/rows.h"
#include "tests/check.h"
#include "tests/special_rows.h"
#include "tests/transforms.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

constexpr std::size_t kGuard = 64;

// A buffer of `count` elements with guard bytes on both sides.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t count) : count_(count), bytes_(count * sizeof(T) + 3 * kGuard, 0x5a) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    start_ = (address + 2 * kGuard - 1) / kGuard * kGuard - address;
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data() + start_); }
  bool kept() const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (bytes_[start_ - 1 - i] != 0x5a || bytes_[start_ + count_ * sizeof(T) + i] != 0x5a) return false;
    }
    return true;
  }

 private:
  std::size_t count_, start_;
  std::vector<unsigned char> bytes_;
};

struct Case {
  std::size_t order = 1, width = 0;  // width 0: no transform
  std::size_t channels = 0, rows = 1;
  std::size_t group = 0;  // 0: all channels
  int levels = 127;
  bool hartley = false;
  std::size_t gap = 0;     // bytes between rows of codes
  double scale = 0;        // of the transform; 0: the orthonormal one
  bool negative = false;   // a factor of order 1 that is -1
};

struct Result {
  std::vector<int> codes;  // [rows][channels]
  std::vector<double> scales;
};

std::vector<float> factor_of(const Case& c) {
  if (c.negative) return {-1.0f};
  return c.hartley ? hartley(c.order) : hadamard(c.order);
}

float scale_of(const Case& c) {
  return static_cast<float>(c.scale != 0 ? c.scale : 1.0 / std::sqrt(static_cast<double>(c.order * c.width)));
}

template <class T>
Result run(Isa isa, const Case& c, const std::vector<double>& x) {
  std::unique_ptr<HadamardTransform> transform;
  if (c.width != 0) {
    transform = std::make_unique<HadamardTransform>(static_cast<std::int64_t>(c.order * c.width), factor_of(c),
                                                    static_cast<std::int64_t>(c.order), scale_of(c));
  }
  const std::size_t group = c.group == 0 ? c.channels : c.group, groups = (c.channels + group - 1) / group;
  const RowsProblem problem{transform ? &transform->problem() : nullptr, c.channels, group, c.levels};
  const std::size_t padded = rows_stride(c.channels), stride = padded + c.gap;
  Guarded<T> in(c.rows * c.channels);
  Guarded<std::int8_t> codes(c.rows * stride - c.gap);
  Guarded<float> scales(c.rows), scratch(rows_scratch_floats(problem));
  Guarded<std::int32_t> sums(c.rows * groups);
  for (std::size_t i = 0; i < x.size(); ++i) from_float(static_cast<float>(x[i]), in.data() + i);
  const std::vector<T> before(in.data(), in.data() + x.size());
  rows_kernels(isa).run[static_cast<int>(Kind<T>::element)](
      problem, in.data(), c.rows, {codes.data(), stride, scales.data(), sums.data()}, scratch.data());
  EXPECT(in.kept() && codes.kept() && scales.kept() && scratch.kept() && sums.kept(),
         "%s: guard bytes, order %zu, width %zu, channels %zu", isa_name(isa), c.order, c.width, c.channels);
  EXPECT(std::memcmp(before.data(), in.data(), x.size() * sizeof(T)) == 0, "the input is left alone");
  Result result;
  for (std::size_t row = 0; row < c.rows; ++row) {
    const std::int8_t* from = codes.data() + row * stride;
    result.scales.push_back(static_cast<double>(scales.data()[row]));
    std::vector<std::int32_t> expected(groups, 0);
    for (std::size_t i = 0; i < c.channels; ++i) {
      result.codes.push_back(from[i]);
      expected[i / group] += from[i];
    }
    bool zero = true, between = true;
    for (std::size_t i = c.channels; i < padded; ++i) zero = zero && from[i] == 0;
    for (std::size_t i = padded; i < stride && row + 1 < c.rows; ++i) between = between && from[i] == 0x5a;
    EXPECT(zero, "%s: codes after the last channel are zero", isa_name(isa));
    EXPECT(between, "%s: bytes between rows are left alone", isa_name(isa));
    EXPECT(std::memcmp(expected.data(), sums.data() + row * groups, groups * sizeof(std::int32_t)) == 0,
           "%s: sums of codes, channels %zu, group %zu", isa_name(isa), c.channels, group);
  }
  return result;
}

// Codes may differ by one where the quotient is a tie within the rounding of float.
template <class T>
void agrees(Isa isa, const Case& c, const std::vector<double>& x) {
  std::vector<double> z = x;
  if (c.width != 0) z = transformed(x, factor_of(c), c.order, c.width, scale_of(c));
  const Result got = run<T>(isa, c, x);
  // Errors relative to the largest of a row: a sum's order and the rounding of the scale.
  double depth = 0;
  if (c.width != 0) depth = std::sqrt(static_cast<double>(c.order)) + std::log2(static_cast<double>(c.width));
  const double relative = (2 + depth) * 1.2e-7;
  for (std::size_t row = 0; row < c.rows; ++row) {
    double largest = kRowEpsilon;
    for (std::size_t i = 0; i < c.channels; ++i) largest = std::fmax(largest, std::fabs(z[row * c.channels + i]));
    const double scale = largest / c.levels;
    EXPECT(std::fabs(got.scales[row] - scale) <= relative * scale,
           "%s: order %zu, width %zu, row %zu: scale %g, not %g", isa_name(isa), c.order, c.width, row, got.scales[row],
           scale);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < c.channels; ++i) {
      const int code = got.codes[row * c.channels + i];
      const double quotient = z[row * c.channels + i] / scale;
      if (std::fabs(code - quotient) > 0.5 + 2 * relative * c.levels || std::abs(code) > c.levels) ++wrong;
    }
    EXPECT(wrong == 0, "%s: order %zu, width %zu, channels %zu, levels %d, row %zu: %zu wrong codes", isa_name(isa),
           c.order, c.width, c.channels, c.levels, row, wrong);
  }
}

template <class T>
std::vector<double> values(const Case& c) {
  Random random(c.channels * 31 + c.rows);
  std::vector<double> x(c.rows * c.channels);
  for (double& value : x) value = random.next();
  return rounded<T>(x);
}

template <class T>
void agrees(Isa isa, const Case& c) {
  agrees<T>(isa, c, values<T>(c));
}

void all_shapes(Isa isa) {
  // No transform: around every edge of the codes' alignment, all groups, both widths.
  for (const std::size_t channels : {1, 15, 31, 32, 33, 63, 64, 65, 96, 127, 128, 160, 200, 576, 1000}) {
    for (const std::size_t group : {0, 32, 64, 128}) {
      for (const int levels : {127, 7}) {
        const Case c{1, 0, channels, 3, group, levels, false, channels % 3};
        agrees<float>(isa, c);
        agrees<Half>(isa, c);
        agrees<BFloat16>(isa, c);
      }
    }
  }
  // Powers of two, and two small factors, from widths below a vector on; one block and several.
  for (const std::size_t order : {1, 12, 20}) {
    for (std::size_t width = 1; width <= (order == 1 ? 16384 : 256); width *= 2) {
      for (const std::size_t blocks : {1, 2, 3, 18}) {
        if (blocks * order * width > 20000) continue;
        const std::size_t group = width % 3 == 1 ? 32 : width % 3 == 2 ? 128 : 0;
        const int levels = width % 5 == 1 ? 7 : 127;
        const Case c{order, width, blocks * order * width, blocks % 2 + 1, group, levels, false, blocks};
        agrees<float>(isa, c);
        agrees<Half>(isa, c);
        agrees<BFloat16>(isa, c);
      }
    }
  }
  for (const std::size_t order : kHadamardOrders) {
    for (const std::size_t width : {1, 8, 16, 32, 64}) {
      if (order > 200 && width > 16) continue;
      agrees<float>(isa, {order, width, order * width, 1, 64});
    }
    agrees<Half>(isa, {order, 16, 2 * order * 16, 1, 128});
  }
  for (const std::size_t order : {3, 5, 9, 107}) {
    for (const std::size_t width : {2, 16, 32}) agrees<float>(isa, {order, width, 2 * order * width, 3, 32, 127, true});
  }
  for (const std::size_t width : {8, 128}) {
    agrees<float>(isa, {1, width, 2 * width, 3, 32, 127, false, 0, 0, true});
    for (const double scale : {1e30, 1.0, 1e-6, 1e-30}) {  // the smallest leave the least scale alone
      agrees<float>(isa, {12, width, 24 * width, 2, 128, 127, false, 0, scale});
    }
  }
  agrees<float>(isa, {28, 512, 14336, 3, 128});
  agrees<Half>(isa, {148, 128, 18944, 1, 0});
}

template <class T>
void all_special_rows(Isa isa, double huge) {
  for (const std::size_t width : {0, 2, 16, 64}) {
    for (const std::size_t group : {0, 32}) {
      const Case c{12, width, 12 * (width == 0 ? 10 : width) * 2, kSpecialRows, group};
      const std::vector<double> finite = special_rows(values<T>(c), c.channels, huge, &rounded<T>);
      agrees<T>(isa, c, finite);
      check_special_rows(std::string(isa_name(isa)) + ", width " + std::to_string(width),
                         run<T>(isa, c, not_finite(finite, c.channels)), run<T>(isa, c, finite), c.channels);
    }
  }
}

}  // namespace

int main() {
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) {
      std::printf("NOT RUN: %s\n", isa_name(isa));
      continue;
    }
    all_shapes(isa);
    all_special_rows<float>(isa, 1e36);  // 24 * 64 of them are beyond the largest float, times the scale they are not
    all_special_rows<Half>(isa, 65504);
    all_special_rows<BFloat16>(isa, std::ldexp(1.0, 120));
  }
  return test::failures == 0 ? 0 : 1;
}
