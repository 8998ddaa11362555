// The whole operator without a runtime: it is the product of the rows that the quantizer makes, in panels, on any
// number of threads; and its working memory holds no rotated rows and no weights in float.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "matmul/fused.h"
#include "tests/check.h"
#include "tests/counted.h"
#include "tests/parallel.h"
#include "tests/product_case.h"
#include "tests/transforms.h"

using namespace graphrot;
using test::Case;
using test::Guarded;
using test::Shape;
using test::backwards;
using test::in_order;
using test::on_three_threads;

namespace {

struct Rotation {
  std::size_t size, order;  // size 0: none
};

std::unique_ptr<HadamardTransform> transform(const Rotation& rotation) {
  if (rotation.size == 0) return nullptr;
  const std::vector<float> factor = rotation.order == 1 ? std::vector<float>{1.0f} : test::paley_one(rotation.order);
  return std::unique_ptr<HadamardTransform>(
      new HadamardTransform(static_cast<std::int64_t>(rotation.size), factor, static_cast<std::int64_t>(rotation.order),
                            1.0f / std::sqrt(static_cast<float>(rotation.size))));
}

std::vector<float> activations(std::size_t rows, std::size_t channels) {
  test::Random random(rows + channels);
  std::vector<float> x(rows * channels);
  for (float& value : x) value = random.between(-2.0f, 2.0f);
  for (std::size_t m = 0; m < rows; ++m) x[m * channels + m % channels] = 70.0f;  // an outlier
  if (rows > 3) {
    for (std::size_t k = 0; k < channels; ++k) x[channels + k] = 0.0f;
    x[2 * channels + channels / 2] = std::numeric_limits<float>::quiet_NaN();
    x[3 * channels] = -std::numeric_limits<float>::infinity();
  }
  return x;
}

// What the operator must give, from the rows by their own kernel and exact sums.
void check_values(const Case& c, const QuantizedRows& rows, const float* y, const std::string& name) {
  const Shape& s = c.shape;
  std::size_t wrong = 0;
  for (std::size_t m = 0; m < s.rows; ++m) {
    for (std::size_t n = 0; n < s.columns; ++n) {
      double total = 0, size = 0;
      for (std::size_t g = 0; g < c.groups; ++g) {
        std::int64_t sum = 0;
        for (std::size_t k = g * s.group; k < std::min(s.channels, (g + 1) * s.group); ++k) {
          sum += rows.codes[m * rows.stride + k] * (c.weights[n * s.channels + k] - c.zeros[n * c.groups + g]);
        }
        const double part = static_cast<double>(sum) * c.scales[n * c.groups + g];
        total += part;
        size += std::fabs(part);
      }
      const double scale = rows.scales[m], bias = s.bias ? c.bias[n] : 0.0;
      const double expected = total * scale + bias, found = y[m * s.columns + n];
      if (std::isnan(expected) ? !std::isnan(found) : !(std::fabs(found - expected) <= 3e-7 * (size * scale + std::fabs(bias)))) ++wrong;
    }
  }
  EXPECT(wrong == 0, "%s: %zu of %zu values", name.c_str(), wrong, s.rows * s.columns);
}

template <class Parallel>
void run(const FusedMatMul& product, const std::vector<float>& x, std::size_t rows, float* y, const Parallel& parallel) {
  ScratchPool pool;
  product.run(x.data(), rows, y, pool, parallel);
}

void check(Isa isa, const Shape& shape, const Rotation& rotation, int levels) {
  const std::string name = std::string(isa_name(isa)) + " M=" + std::to_string(shape.rows) + " K=" + std::to_string(shape.channels) +
                           " N=" + std::to_string(shape.columns) + " group=" + std::to_string(shape.group);
  const Case c(shape);
  const FusedMatMul product(c.source(shape.columns), transform(rotation), levels, Element::kFloat, isa);
  const std::vector<float> x = activations(shape.rows, shape.channels);

  const std::unique_ptr<HadamardTransform> same = transform(rotation);
  const RowsProblem problem{same != nullptr ? &same->problem() : nullptr, shape.channels, shape.group, levels};
  std::vector<std::int8_t> codes(shape.rows * c.stride);
  std::vector<float> scales(shape.rows);
  std::vector<std::int32_t> sums(shape.rows * c.groups);
  const QuantizedRows rows{codes.data(), c.stride, scales.data(), sums.data()};
  Guarded scratch(rows_scratch_floats(problem) * sizeof(float));
  rows_kernels(isa).run[0](problem, x.data(), shape.rows, rows, scratch.as<float>());

  const std::size_t bytes = shape.rows * shape.columns * sizeof(float);
  Guarded y(bytes), again(bytes), threaded(bytes);
  run(product, x, shape.rows, y.as<float>(), in_order);
  run(product, x, shape.rows, again.as<float>(), backwards);
  run(product, x, shape.rows, threaded.as<float>(), on_three_threads);
  check_values(c, rows, y.as<float>(), name);
  EXPECT(std::memcmp(y.as<char>(), again.as<char>(), bytes) == 0, "%s: the order of tasks changes nothing", name.c_str());
  EXPECT(std::memcmp(y.as<char>(), threaded.as<char>(), bytes) == 0, "%s: threads change nothing", name.c_str());
  EXPECT(y.kept() && again.kept() && threaded.kept(), "%s: guard bytes of the output", name.c_str());
}

// All that is allocated while it runs: codes of one panel with their sums, floats of a few rows, and a panel of
// weights that is smaller than it would be in float.
void check_memory(Isa isa) {
  constexpr std::size_t kRows = 600, kChannels = 28 * 256, kColumns = 130, kPanel = 200;
  const Shape shape{1, kChannels, kColumns, 128, 128, 4, false, false, test::Values::kRandom};
  const Case c(shape);
  const FusedMatMul product(c.source(kColumns), transform({kChannels, 28}), 127, Element::kFloat, isa);
  const std::vector<float> x = activations(kRows, kChannels);
  std::vector<float> y(kRows * kColumns);
  const std::unique_ptr<HadamardTransform> same = transform({kChannels, 28});
  const RowsProblem problem{&same->problem(), kChannels, 128, 127};
  const ProductWeights weights(c.source(kColumns));
  const std::size_t row_floats = rows_scratch_floats(problem) * sizeof(float);
  const std::size_t weight_panel = product_scratch_bytes(weights.problem(), kPanel);
  EXPECT(row_floats <= 4 * kChannels * sizeof(float), "%s: floats of at most four rows: %zu", isa_name(isa), row_floats);
  EXPECT(weight_panel < 64 * kChannels * sizeof(float) / 2, "%s: no tile of weights in float: %zu", isa_name(isa), weight_panel);

  const std::size_t before = test::live_bytes;
  test::most_bytes = before;
  ScratchPool pool;
  product.run(x.data(), kRows, y.data(), pool, in_order);
  const std::size_t used = test::most_bytes - before;
  const std::size_t codes = kPanel * kChannels, sums = kPanel * (kChannels / 128 + 16) * sizeof(float);
  const std::size_t larger = row_floats > weight_panel ? row_floats : weight_panel;
  EXPECT(used <= codes + sums + larger + 4096, "%s: %zu bytes, of which codes are %zu", isa_name(isa), used, codes);
  EXPECT(used >= codes, "%s: what is counted includes the codes: %zu", isa_name(isa), used);
  EXPECT(used < kPanel * kChannels * sizeof(float) / 2, "%s: no panel of rotated floats: %zu", isa_name(isa), used);
}

void refuses(const WeightSource& source, const Rotation& rotation, int levels, const char* words) {
  bool refused = false;
  try {
    const FusedMatMul product(source, transform(rotation), levels, Element::kFloat, Isa::kScalar);
  } catch (const std::invalid_argument& error) {
    refused = std::strstr(error.what(), words) != nullptr;
  }
  EXPECT(refused, "refused in words: %s", words);
}

}  // namespace

int main() {
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) {
      std::printf("NOT RUN: fused, %s\n", isa_name(isa));
      continue;
    }
    using test::Values;
    check(isa, {1, 96, 65, 96, 32, 4, false, true, Values::kRandom}, {96, 12}, 127);
    check(isa, {5, 96, 65, 32, 32, 4, true, true, Values::kRandom}, {96, 12}, 127);
    check(isa, {7, 160, 33, 128, 128, 4, true, false, Values::kRandom}, {32, 1}, 7);
    check(isa, {97, 131, 70, 131, 64, 4, false, false, Values::kRandom}, {0, 0}, 127);
    check(isa, {130, 576, 130, 128, 128, 4, false, true, Values::kRandom}, {0, 0}, 127);
    check(isa, {259, 64, 17, 64, 64, 8, true, true, Values::kRandom}, {64, 1}, 127);
    check_memory(isa);
  }
  const Case c({1, 96, 8, 96, 32, 4, false, false, test::Values::kRandom});
  refuses(c.source(8), {64, 1}, 127, "no multiple of the transform's size 64");
  refuses(c.source(8), {0, 0}, 15, "127 or 7 levels");
  return test::failures == 0 ? 0 : 1;
}
