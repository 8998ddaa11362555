// Every path against the definition: sums of integers bit for bit, what is made of them against double.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "matmul/product.h"
#include "matmul/product_blocks.h"
#include "tests/check.h"
#include "tests/product_case.h"

using namespace graphrot;
using namespace graphrot::test;

namespace graphrot {
#if GRAPHROT_X86
const ProductKernels& product_amx_emulated();
#endif
}  // namespace graphrot

namespace {

struct Path {
  const char* name;
  const ProductKernels* kernels;
  std::size_t scratch_bytes;  // 0: as many as it is told
};

template <class T>
struct Kind;
template <>
struct Kind<float> {
  static constexpr Element element = Element::kFloat;
  static constexpr double rounding = 0;
};
template <>
struct Kind<Half> {
  static constexpr Element element = Element::kHalf;
  static constexpr double rounding = 4.9e-4;
};
template <>
struct Kind<BFloat16> {
  static constexpr Element element = Element::kBFloat16;
  static constexpr double rounding = 3.95e-3;
};

// What a kernel is given, each piece between guards of its own.
template <class T>
class Run {
 public:
  Run(const Case& c, const ProductProblem& packed, std::size_t rows)
      : problem(packed),
        rows_(rows),
        stride_(packed.columns + 3),
        codes_(rows * c.stride),
        scales_(rows * sizeof(float)),
        sums_(rows * c.groups * sizeof(std::int32_t)),
        weights_(packed.tiles * packed.units * kUnitBytes),
        weight_scales_(packed.tiles * packed.groups * kTileColumns * sizeof(float)),
        zeros_(packed.tiles * packed.groups * kTileColumns),
        bias_(packed.tiles * kTileColumns * sizeof(float)),
        out_(((rows - 1) * stride_ + packed.columns) * sizeof(T)) {
    std::memcpy(codes_.as<void>(), c.codes.data(), rows * c.stride);
    std::memcpy(scales_.as<void>(), c.row_scales.data(), rows * sizeof(float));
    std::memcpy(sums_.as<void>(), c.row_sums.data(), rows * c.groups * sizeof(std::int32_t));
    std::memcpy(weights_.as<void>(), packed.codes, packed.tiles * packed.units * kUnitBytes);
    const std::size_t entries = packed.tiles * packed.groups * kTileColumns;
    std::memcpy(weight_scales_.as<void>(), packed.scales, entries * sizeof(float));
    problem.codes = weights_.as<std::uint8_t>();
    problem.scales = weight_scales_.as<float>();
    if (packed.zeros != nullptr) {
      std::memcpy(zeros_.as<void>(), packed.zeros, entries);
      problem.zeros = zeros_.as<std::uint8_t>();
    }
    if (packed.bias != nullptr) {
      std::memcpy(bias_.as<void>(), packed.bias, packed.tiles * kTileColumns * sizeof(float));
      problem.bias = bias_.as<float>();
    }
    rows_in = {codes_.as<std::int8_t>(), c.stride, scales_.as<float>(), sums_.as<std::int32_t>()};
  }

  void operator()(const Path& path, std::size_t first, std::size_t last) {
    Guarded scratch(path.scratch_bytes != 0 ? path.scratch_bytes : product_scratch_bytes(problem, rows_));
    const ProductRun run = path.kernels->run[static_cast<int>(Kind<T>::element)];
    run(problem, rows_in, rows_, first, last, out_.template as<void>(), stride_, scratch.as<void>());
    EXPECT(scratch.kept(), "%s: guard bytes of scratch, %zu rows", path.name, rows_);
  }

  void check_guards(const char* name) const {
    const bool kept = codes_.kept() && scales_.kept() && sums_.kept() && weights_.kept() && weight_scales_.kept() &&
                      zeros_.kept() && bias_.kept() && out_.kept();
    EXPECT(kept, "%s: guard bytes, M %zu, K %zu, N %zu", name, rows_, problem.channels, problem.columns);
  }

  float at(std::size_t m, std::size_t n) { return to_float(out_.template as<T>()[m * stride_ + n]); }

  // Bytes between the rows, and before the first tile that was asked for, are as they were.
  bool untouched(std::size_t m, std::size_t from, std::size_t to) {
    const auto* bytes = out_.template as<unsigned char>();
    for (std::size_t i = (m * stride_ + from) * sizeof(T); i < (m * stride_ + to) * sizeof(T); ++i) {
      if (bytes[i] != 0x5a) return false;
    }
    return true;
  }

  ProductProblem problem;
  QuantizedRows rows_in{};

 private:
  std::size_t rows_, stride_;
  Guarded codes_, scales_, sums_, weights_, weight_scales_, zeros_, bias_, out_;
};

// Unit scales: the float sum over groups of what the integers are, rounded once per group. Else: in double, with the
// roundings that floats allow.
template <class T>
void compare(const Path& path, const Case& c, Run<T>* run, std::size_t rows, std::size_t columns) {
  std::size_t wrong = 0;
  for (std::size_t m = 0; m < rows; ++m) {
    for (std::size_t n = 0; n < columns; ++n) {
      float ordered = 0;
      double exact = 0, size = 0;
      for (std::size_t g = 0; g < c.groups; ++g) {
        ordered += static_cast<float>(c.sum(m, n, g));
        const double term = static_cast<double>(c.scales[n * c.groups + g]) * static_cast<double>(c.sum(m, n, g));
        exact += term;
        size += std::fabs(term);
      }
      const double bias = c.shape.bias ? c.bias[n] : 0.0f;
      exact = exact * c.row_scales[m] + bias;
      size = size * c.row_scales[m] + std::fabs(bias);
      const double tolerance = size * 6e-8 * static_cast<double>(c.groups + 4) + std::fabs(exact) * Kind<T>::rounding;
      const float got = run->at(m, n);
      const bool same = c.shape.values == Values::kUnitScales && !c.shape.bias && Kind<T>::rounding == 0
                            ? got == ordered
                            : std::fabs(got - exact) <= tolerance;
      if (!same && wrong++ == 0) {
        EXPECT(same, "%s, M %zu, K %zu, N %zu, group %zu, bits %d, zeros %d: [%zu, %zu] is %.9g, not %.9g", path.name,
               rows, c.shape.channels, columns, c.shape.group, c.shape.bits, c.shape.zeros, m, n,
               static_cast<double>(got), exact);
      }
    }
    if (m + 1 < rows) EXPECT(run->untouched(m, columns, columns + 3), "%s: stores stay within N", path.name);
  }
  run->check_guards(path.name);
}

template <class T>
void agrees(const Path& path, const Case& c, std::size_t rows, std::size_t columns) {
  const ProductWeights weights(c.source(columns));
  Run<T> run(c, weights.problem(), rows);
  run(path, 0, weights.problem().tiles);
  compare(path, c, &run, rows, columns);
}

void all_shapes(const Path& path) {
  for (const std::size_t channels : {1, 3, 17, 31, 33, 96, 161, 576}) {
    for (const std::size_t group : {channels, std::size_t{32}, std::size_t{64}, std::size_t{128}}) {
      for (const int bits : {4, 8}) {
        for (const bool zeros : {false, true}) {
          const std::size_t block = group == channels ? (zeros ? 16 : 1024) : group;
          const std::size_t most = channels == 576 ? 35 : 67;
          const Case c({most, channels, 130, group, block, bits, zeros, false, Values::kUnitScales});
          const Case biased({19, channels, 130, group, block, bits, zeros, true, Values::kRandom});
          for (const std::size_t columns : {1, 17, 63, 64, 65, 130}) {
            agrees<float>(path, biased, 1 + (columns + channels) % 19, columns);
            if (channels <= 33 && columns > 17 && columns < 65) continue;
            agrees<float>(path, c, 1 + (columns + channels) % most, columns);
          }
          if (channels != 3 && channels != 161) continue;
          for (std::size_t rows = 1; rows <= 67; rows += rows < 17 ? 1 : rows < 31 ? 14 : 4) {
            agrees<float>(path, c, rows, 65);
          }
        }
      }
    }
  }
}

void long_rows(const Path& path) {
  for (const std::size_t channels : {1536, 4100}) {
    for (const std::size_t group : {channels, std::size_t{32}, std::size_t{128}}) {
      for (const int bits : {4, 8}) {
        const std::size_t block = group == channels ? 32 : group;
        const Case c({23, channels, 67, group, block, bits, channels == 4100, false, Values::kUnitScales});
        for (const std::size_t rows : {1, 2, 5, 23}) agrees<float>(path, c, rows, 67);
      }
    }
  }
}

void extreme_codes(const Path& path) {
  for (const int bits : {4, 8}) {
    for (const std::size_t rows : {1, 2, 4, 9, 33}) {
      agrees<float>(path, Case({rows, 300, 66, 300, 32, bits, true, false, Values::kExtreme}), rows, 66);
      agrees<float>(path, Case({rows, 300, 66, 128, 128, bits, false, true, Values::kExtreme}), rows, 66);
      if (rows == 1 || rows == 9) {
        agrees<float>(path, Case({rows, 65536, 3, 65536, 256, bits, true, false, Values::kExtreme}), rows, 3);
      }
    }
  }
}

void half_types(const Path& path) {
  for (const std::size_t group : {200, 64}) {
    const Case c({35, 200, 79, group, 64, 4, false, true, Values::kRandom});
    for (const std::size_t rows : {1, 3, 7, 35}) {
      agrees<Half>(path, c, rows, 79);
      agrees<BFloat16>(path, c, rows, 79);
    }
  }
}

// Whole numbers that are ties between two halves: rounded to even, as by the definition in element.h.
template <class T>
void rounds_to_even(const Path& path) {
  const Case c({9, 70, 69, 70, 16, 4, false, false, Values::kUnitScales});
  const ProductWeights weights(c.source(69));
  for (const std::size_t rows : {1, 9}) {
    Run<float> exact(c, weights.problem(), rows);
    Run<T> run(c, weights.problem(), rows);
    exact(path, 0, weights.problem().tiles);
    run(path, 0, weights.problem().tiles);
    for (std::size_t m = 0; m < rows; ++m) {
      for (std::size_t n = 0; n < 69; ++n) {
        T rounded{};
        from_float(exact.at(m, n), &rounded);
        EXPECT(run.at(m, n) == to_float(rounded), "%s: %g becomes %g", path.name, static_cast<double>(exact.at(m, n)),
               static_cast<double>(run.at(m, n)));
      }
    }
  }
}

// A row that is not finite has the scale NaN and codes of zero; a row of zeros has codes of zero.
template <class T>
void special_rows(const Path& path) {
  Case c({20, 100, 70, 32, 32, 4, false, true, Values::kRandom});
  for (const std::size_t m : {0, 3, 11}) {
    std::memset(c.codes.data() + m * c.stride, 0, c.stride);
    for (std::size_t g = 0; g < c.groups; ++g) c.row_sums[m * c.groups + g] = 0;
    if (m != 3) c.row_scales[m] = std::numeric_limits<float>::quiet_NaN();
  }
  const ProductWeights weights(c.source(70));
  for (const std::size_t rows : {1, 5, 20}) {
    Run<T> run(c, weights.problem(), rows);
    run(path, 0, weights.problem().tiles);
    for (std::size_t m = 0; m < rows; ++m) {
      for (std::size_t n = 0; n < 70; ++n) {
        const bool nan = m == 0 || m == 11;
        EXPECT(std::isnan(run.at(m, n)) == nan, "%s: row %zu is not a number, and only it", path.name, m);
        T bias{};
        from_float(c.bias[n], &bias);
        EXPECT(m != 3 || run.at(m, n) == to_float(bias), "%s: a row of zeros gives the bias", path.name);
      }
    }
  }
}

void disjoint_tiles(const Path& path) {
  const Case c({40, 160, 637, 64, 64, 4, true, false, Values::kUnitScales});
  const ProductWeights weights(c.source(637));
  for (const std::size_t rows : {1, 4, 40}) {
    Run<float> part(c, weights.problem(), rows);
    part(path, 1, 3);
    bool alone = true;
    for (std::size_t m = 0; m < rows; ++m) {
      alone = alone && part.untouched(m, 0, 64) && part.untouched(m, 192, 637);
      for (std::size_t n = 64; n < 192; ++n) alone = alone && !part.untouched(m, n, n + 1);
    }
    EXPECT(alone, "%s: the tiles that were asked for are written, and no others", path.name);
    Run<float> both(c, weights.problem(), rows);
    std::thread other([&] { both(path, 9, 10); });
    both(path, 0, 9);
    other.join();
    compare(path, c, &both, rows, 637);
  }
}

// More rows than share a panel.
void many_rows(const Path& path) {
  for (const std::size_t group : {90, 32}) {
    const Case c({261, 90, 70, group, 32, 4, false, false, Values::kUnitScales});
    agrees<float>(path, c, 257, 70);
    agrees<float>(path, c, 261, 70);
  }
}

void all(const Path& path) {
  all_shapes(path);
  many_rows(path);
  long_rows(path);
  extreme_codes(path);
  half_types(path);
  rounds_to_even<Half>(path);
  rounds_to_even<BFloat16>(path);
  special_rows<float>(path);
  special_rows<Half>(path);
  special_rows<BFloat16>(path);
  disjoint_tiles(path);
}

}  // namespace

int main() {
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) {
      std::printf("NOT RUN: %s\n", isa_name(isa));
    } else if (isa != Isa::kAvx512) {  // which is the path of kAvx2
      all({isa_name(isa), &product_kernels(isa), 0});
    }
  }
  EXPECT(&product_kernels(Isa::kAvx512) == &product_kernels(Isa::kAvx2), "one path for both");
#if GRAPHROT_X86
  if (isa_available(Isa::kVnni)) {
    all({"amx, emulated", &product_amx_emulated(), blocks::kTiledBytes});
  } else {
    std::printf("NOT RUN: amx, emulated\n");
  }
#endif
  return test::failures == 0 ? 0 : 1;
}
