// Every path against the definition in double, for factors of all kinds, sizes around every inner loop's
// edge, odd numbers of blocks, in place, beside guard values, and with values that are not finite.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "hadamard/hadamard.h"
#include "tests/check.h"
#include "tests/transforms.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

constexpr std::size_t kGuard = 64;  // elements on each side of a buffer
// Runs in place or apart, checks the guards, and returns the output.
template <class T>
std::vector<double> run(Isa isa, const HadamardTransform& transform, const std::vector<double>& x, bool in_place) {
  const std::size_t count = x.size(), bytes = count * sizeof(T);
  std::vector<T> in(count + 2 * kGuard), out(count + 2 * kGuard);
  std::memset(static_cast<void*>(in.data()), 0x5a, in.size() * sizeof(T));
  std::memset(static_cast<void*>(out.data()), 0x5a, out.size() * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) from_float(static_cast<float>(x[i]), &in[kGuard + i]);
  const std::vector<T> before = in;
  std::vector<float> scratch(transform.scratch_floats() + 2 * kGuard, 1234.5f);
  auto* aligned = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(scratch.data()) + 63) / 64 * 64);
  std::vector<T>& result = in_place ? in : out;
  const std::size_t blocks = count / transform.problem().size;
  hadamard_kernels(isa).run[static_cast<int>(Kind<T>::element)](transform.problem(), in.data() + kGuard,
                                                                result.data() + kGuard, blocks, aligned);
  for (const std::vector<T>* buffer : {&in, &out}) {
    const auto* raw = reinterpret_cast<const unsigned char*>(buffer->data());
    bool kept = true;
    for (std::size_t i = 0; i < kGuard * sizeof(T); ++i) {
      kept = kept && raw[i] == 0x5a && raw[kGuard * sizeof(T) + bytes + i] == 0x5a;
    }
    EXPECT(kept, "guard values around a buffer, size %zu", transform.problem().size);
  }
  EXPECT(in_place || std::memcmp(in.data(), before.data(), in.size() * sizeof(T)) == 0, "the input is left alone");
  EXPECT(aligned[transform.scratch_floats()] == 1234.5f, "scratch guard, size %zu", transform.problem().size);
  std::vector<double> y(count);
  for (std::size_t i = 0; i < count; ++i) y[i] = to_float(result[kGuard + i]);
  return y;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::fmax(most, std::fabs(a[i] - b[i]));
  return most;
}

template <class T>
void agrees(Isa isa, const std::vector<float>& factor, std::size_t order, std::size_t levels, std::size_t blocks) {
  const std::size_t width = std::size_t{1} << levels, size = order * width;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  const HadamardTransform transform(static_cast<std::int64_t>(size), factor, static_cast<std::int64_t>(order), scale);
  Random random(size * 31 + blocks);
  std::vector<double> x(size * blocks);
  for (double& value : x) value = random.next();
  x = rounded<T>(x);
  const std::vector<double> expected = transformed(x, factor, order, width, scale);
  // Values are below 6. Sums of `order` terms are taken one after the other, each rounded in float.
  const double tolerance = 6 * Kind<T>::rounding + 6 * 1.2e-7 * std::sqrt(static_cast<double>(order + levels));
  for (const bool in_place : {false, true}) {
    const double error = distance(run<T>(isa, transform, x, in_place), expected);
    EXPECT(error <= tolerance, "%s, order %zu, levels %zu, blocks %zu: error %g over %g", isa_name(isa), order, levels,
           blocks, error, tolerance);
  }
}

void all_sizes(Isa isa) {
  for (std::size_t levels = 0; levels <= 14; ++levels) {
    const std::vector<std::size_t> counts =
        levels < 5 ? std::vector<std::size_t>{1, 2, 3, 15, 16, 17, 33} : std::vector<std::size_t>{1, 3};
    for (const std::size_t blocks : counts) {
      agrees<float>(isa, {1.0f}, 1, levels, blocks);
      agrees<Half>(isa, {1.0f}, 1, levels, blocks);
      agrees<BFloat16>(isa, {1.0f}, 1, levels, blocks);
      if (levels > 9) continue;
      for (const std::size_t order : {12, 20}) {
        agrees<float>(isa, hadamard(order), order, levels, blocks);
        agrees<Half>(isa, hadamard(order), order, levels, blocks);
        agrees<BFloat16>(isa, hadamard(order), order, levels, blocks);
      }
      for (const std::size_t order : {3, 5, 7}) agrees<float>(isa, hartley(order), order, levels, blocks);
    }
  }
  for (const std::size_t order : kHadamardOrders) {
    agrees<float>(isa, hadamard(order), order, 0, 17);
    agrees<float>(isa, hadamard(order), order, 4, 2);
    agrees<float>(isa, hadamard(order), order, 5, 1);
  }
  for (const std::size_t order : {9, 33, 107}) {
    agrees<float>(isa, hartley(order), order, 0, 3);
    agrees<float>(isa, hartley(order), order, 4, 2);
  }
  agrees<float>(isa, {-1.0f}, 1, 3, 2);
}

// A kernel that takes the factor's transpose, or drops one level, is seen by these tests.
void mutants_are_seen(Isa isa) {
  const std::vector<float> factor = hadamard(12);
  std::vector<float> transposed(144);
  for (std::size_t i = 0; i < 144; ++i) transposed[i] = factor[(i % 12) * 12 + i / 12];
  const HadamardTransform transform(96, factor, 12, 1.0f / std::sqrt(96.0f));
  Random random(5);
  std::vector<double> x(96);
  for (double& value : x) value = rounded<float>({random.next()})[0];
  const std::vector<double> got = run<float>(isa, transform, x, false);
  const double scale = 1.0 / std::sqrt(96.0);
  EXPECT(distance(got, transformed(x, transposed, 12, 8, scale)) > 0.1, "a transposed factor differs");
  EXPECT(distance(got, transformed(x, factor, 12, 4, scale)) > 0.1, "a level less differs");
}

template <class T>
void not_finite(Isa isa) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const std::size_t levels : {0, 2, 5}) {
    const std::size_t width = std::size_t{1} << levels, size = 12 * width, blocks = 5;
    const HadamardTransform transform(static_cast<std::int64_t>(size), hadamard(12), 12, 0.5f);
    std::vector<double> x(size * blocks, 0.25);
    x[size + 3] = std::nan("");
    x[3 * size + 1] = kInfinity;
    const std::vector<double> expected = transformed(x, hadamard(12), 12, width, 0.5);
    const std::vector<double> got = run<T>(isa, transform, x, false);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const bool same = std::isnan(expected[i]) ? std::isnan(got[i])
                        : std::isinf(expected[i]) ? got[i] == expected[i]
                                                  : std::fabs(got[i] - expected[i]) < 1e-4 + 4 * Kind<T>::rounding;
      EXPECT(same, "%s, levels %zu, element %zu: %g, not %g", isa_name(isa), levels, i, got[i], expected[i]);
      if (i / size != 1 && i / size != 3) EXPECT(std::isfinite(got[i]), "other blocks stay finite");
    }
  }
}

// Results below the smallest normal number are rounded, not flushed to zero.
template <class T>
void subnormal(Isa isa, double smallest) {
  for (const std::size_t levels : {2, 5, 7}) {
    const std::size_t width = std::size_t{1} << levels, size = 12 * width;
    const HadamardTransform transform(static_cast<std::int64_t>(size), hadamard(12), 12, 0.25f);
    Random random(levels);
    std::vector<double> x(size);
    for (double& value : x) value = smallest * std::floor(4 * random.next());
    const std::vector<double> expected = transformed(x, hadamard(12), 12, width, 0.25);
    const double error = distance(run<T>(isa, transform, x, false), expected);
    EXPECT(error <= 0.5 * smallest, "%s, levels %zu: subnormal results are off by %g", isa_name(isa), levels, error);
  }
}

// The same sums stored as float, and then rounded by the definition: whole numbers, so that many are ties.
template <class T>
void stores_round_to_even(Isa isa, double largest) {
  for (const std::size_t order : {1, 12}) {
    for (const std::size_t levels : {1, 4, 6}) {
      const std::size_t size = order << levels, blocks = 40;
      const std::vector<float> factor = order == 1 ? std::vector<float>{1.0f} : hadamard(order);
      const HadamardTransform transform(static_cast<std::int64_t>(size), factor, static_cast<std::int64_t>(order), 1);
      Random random(order + levels);
      std::vector<double> x(size * blocks);
      for (double& value : x) value = std::floor(largest * random.next());
      const std::vector<double> exact = run<float>(isa, transform, rounded<T>(x), false);
      const double error = distance(run<T>(isa, transform, x, false), rounded<T>(exact));
      EXPECT(error == 0, "%s, order %zu, levels %zu: not rounded to even, off by %g", isa_name(isa), order, levels,
             error);
    }
  }
}

void refused(std::int64_t size, const std::vector<float>& factor, std::int64_t order, float scale, const char* words) {
  std::string message;
  try {
    HadamardTransform transform(size, factor, order, scale);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  EXPECT(message.find(words) != std::string::npos, "expected '%s', got '%s'", words, message.c_str());
}

void wrong_attributes_are_refused() {
  refused(0, {1.0f}, 1, 1.0f, "'size' is 0");
  refused(24, {1.0f}, 1, 1.0f, "power of two");
  refused(40, hadamard(12), 12, 1.0f, "power of two");
  refused(6, hadamard(12), 12, 1.0f, "power of two");
  refused(12, hadamard(12), 11, 1.0f, "square");
  refused(12, hadamard(12), 12, 0.0f, "'scale'");
  refused(12, hadamard(12), 12, std::nanf(""), "'scale'");
  std::vector<float> flipped = hadamard(12);
  flipped[17] = -flipped[17];
  refused(12, flipped, 12, 1.0f, "not orthogonal");
  std::vector<float> bad = hadamard(12);
  bad[5] = std::nanf("");
  refused(12, bad, 12, 1.0f, "not orthogonal");
}

}  // namespace

int main() {
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) continue;
    all_sizes(isa);
    mutants_are_seen(isa);
    not_finite<float>(isa);
    not_finite<Half>(isa);
    not_finite<BFloat16>(isa);
    stores_round_to_even<Half>(isa, 150);
    stores_round_to_even<BFloat16>(isa, 60);
    subnormal<Half>(isa, std::ldexp(1.0, -24));
    subnormal<BFloat16>(isa, std::ldexp(1.0, -133));
  }
  wrong_attributes_are_refused();
  return test::failures == 0 ? 0 : 1;
}
