// Every kernel of the product against its definition, bit for bit: integers are exact, and floats are made of them by
// the same fused multiply-adds, group after group. The CPU's own kernels must say the same.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/isa.h"
#include "cuda_on_cpu/shim.h"
#include "matmul/product.h"
#include "matmul/product_cuda.h"
#include "tests/check.h"
#include "tests/product_case.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

constexpr CudaDevice kA100 = {8, 0, 108, 166912}, kSmallest = {8, 6, 20, 101376};

using Kernel = CudaProductKernel;
constexpr Kernel kGemv = Kernel::kGemv, kSmall = Kernel::kSmall, kMiddle = Kernel::kMiddle, kLarge = Kernel::kLarge;

const char* name_of(Kernel kernel) {
  constexpr const char* kNames[] = {"gemv", "small", "middle", "large"};
  return kNames[static_cast<int>(kernel)];
}

template <class T>
constexpr Element kElement = sizeof(T) == 4 ? Element::kFloat : Element::kHalf;
template <>
constexpr Element kElement<BFloat16> = Element::kBFloat16;

// The values that become scales of 16 bits.
void round_scales(Case* c) {
  for (float& scale : c->scales) {
    Half rounded{};
    from_float(scale, &rounded);
    scale = to_float(rounded);
  }
}

// What the device is given, each piece a buffer of its own.
struct OnDevice {
  OnDevice(const Case& c, bool half)
      : codes(c.codes), row_scales(c.row_scales), row_sums(c.row_sums), weights(c.storage), scales(c.scales),
        half_scales(c.scales.size()), zeros(c.zero_storage), bias(c.bias) {
    for (std::size_t i = 0; i < c.scales.size(); ++i) from_float(c.scales[i], &half_scales[i]);
    // Bytes of a row behind the codes and their zeros are the caller's.
    for (std::size_t i = 0; c.shape.bits == 4 && i < codes.size(); ++i) {
      codes[i / 32 * 32 + i % 2 * 16 + i % 32 / 2] = c.codes[i];
    }
    const std::size_t groups = c.groups;
    product = {c.shape.channels, c.shape.columns, c.shape.group, groups, c.shape.block, c.shape.bits,
               c.shape.bits == 4 ? 8 : 128, weights.data(), nullptr, half, c.shape.zeros ? zeros.data() : nullptr,
               c.shape.bias ? bias.data() : nullptr};
    product.scales = half ? static_cast<const void*>(half_scales.data()) : scales.data();
    rows = {codes.data(), c.stride, row_scales.data(), row_sums.data()};
  }

  shim::Guarded<std::int8_t> codes;
  shim::Guarded<float> row_scales;
  shim::Guarded<std::int32_t> row_sums;
  shim::Guarded<std::uint8_t> weights;
  shim::Guarded<float> scales;
  shim::Guarded<Half> half_scales;
  shim::Guarded<std::uint8_t> zeros;
  shim::Guarded<float> bias;
  CudaProduct product{};
  CudaRows rows{};
};

float expected(const Case& c, std::size_t m, std::size_t n) {
  float total = 0.0f;
  for (std::size_t g = 0; g < c.groups; ++g) {
    total = std::fma(static_cast<float>(c.sum(m, n, g)), c.scales[n * c.groups + g], total);
  }
  return std::fma(total, c.row_scales[m], c.shape.bias ? c.bias[n] : 0.0f);
}

template <class T>
bool same(T a, T b) {
  if (std::isnan(to_float(a)) && std::isnan(to_float(b))) return true;
  return std::memcmp(&a, &b, sizeof a) == 0;
}

std::string words(Kernel kernel, const Case& c, std::size_t rows) {
  const Shape& s = c.shape;
  return std::string(name_of(kernel)) + ", M " + std::to_string(rows) + ", K " + std::to_string(s.channels) + ", N " +
         std::to_string(s.columns) + ", group " + std::to_string(s.group) + ", bits " + std::to_string(s.bits) +
         (s.zeros ? ", zeros" : "");
}

template <class T>
std::vector<T> on_cpu(const Case& c, std::size_t rows, Isa isa) {
  const ProductWeights weights(c.source(c.shape.columns));
  const ProductProblem& problem = weights.problem();
  std::vector<T> out(rows * c.shape.columns);
  Guarded scratch(product_scratch_bytes(problem, rows));
  const QuantizedRows in{const_cast<std::int8_t*>(c.codes.data()), c.stride, const_cast<float*>(c.row_scales.data()),
                         const_cast<std::int32_t*>(c.row_sums.data())};
  product_kernels(isa).run[static_cast<int>(kElement<T>)](problem, in, rows, 0, problem.tiles, out.data(),
                                                          c.shape.columns, scratch.as<void>());
  return out;
}

template <class T>
void agrees(Kernel kernel, const Case& c, std::size_t rows, bool half = false) {
  OnDevice device(c, half);
  shim::Guarded<T> out(rows * c.shape.columns);
  const std::string what = words(kernel, c, rows);
  try {
    product_cuda_by(kernel, device.product, device.rows, kElement<T>, rows, out.data(), nullptr);
  } catch (const std::exception& error) {
    EXPECT(false, "%s: %s", what.c_str(), error.what());
    return;
  }
  EXPECT(out.kept(), "%s: nothing is written beside the output", what.c_str());
  std::size_t wrong = 0;
  for (std::size_t m = 0; m < rows; ++m) {
    for (std::size_t n = 0; n < c.shape.columns; ++n) {
      T value{};
      from_float(expected(c, m, n), &value);
      const T got = out[m * c.shape.columns + n];
      if (same(got, value) || wrong++ > 0) continue;
      EXPECT(false, "%s: [%zu, %zu] is %.9g, not %.9g", what.c_str(), m, n, static_cast<double>(to_float(got)),
             static_cast<double>(to_float(value)));
    }
  }
  EXPECT(wrong == 0, "%s: %zu of %zu are wrong", what.c_str(), wrong, rows * c.shape.columns);
  for (const Isa isa : {Isa::kAvx2, Isa::kVnni}) {
    if (!isa_available(isa)) continue;
    const std::vector<T> other = on_cpu<T>(c, rows, isa);
    std::size_t differ = 0;
    for (std::size_t i = 0; i < other.size(); ++i) differ += same(other[i], out[i]) ? 0 : 1;
    EXPECT(differ == 0, "%s: %zu of %zu are not the CPU's (%s)", what.c_str(), differ, other.size(), isa_name(isa));
  }
}

std::size_t block_of(std::size_t group, std::size_t channels, std::size_t whole) {
  return group == channels ? whole : group;
}

// Ragged rows, columns and channels; every way of scaling; one column of blocks and several.
void shapes(Kernel kernel, const std::vector<std::size_t>& rows, const std::vector<std::size_t>& columns,
            const std::vector<std::size_t>& channels) {
  std::size_t turn = 0;
  for (const std::size_t k : channels) {
    for (const std::size_t group : {k, std::size_t{32}, std::size_t{64}, std::size_t{128}}) {
      for (const int bits : {4, 8}) {
        for (const bool zeros : {false, true}) {
          const std::size_t m = rows[turn % rows.size()], n = columns[turn % columns.size()];
          const std::size_t block = block_of(group, k, turn % 2 == 0 ? 16 : 1024);
          Case c({m, k, n, group, block, bits, zeros, turn % 3 != 0, Values::kRandom});
          const bool half = turn % 5 < 2;
          if (half) round_scales(&c);
          if (turn % 3 == 0) agrees<float>(kernel, c, m, half);
          if (turn % 3 == 1) agrees<Half>(kernel, c, m, half);
          if (turn % 3 == 2) agrees<BFloat16>(kernel, c, m, half);
          ++turn;
        }
      }
    }
  }
}

// Every row count of the kernel for few rows, and rounds of groups.
void few_rows() {
  for (std::size_t m = 1; m <= kCudaGemvRows; ++m) {
    for (const std::size_t group : {200, 32}) {
      agrees<Half>(kGemv, Case({m, 200, 24, group, 32, 4, m % 2 == 0, true, Values::kRandom}), m);
    }
  }
  for (const std::size_t group : {32, 64, 128}) {
    for (const int bits : {4, 8}) {
      const Case c({8, 4160, 9, group, group, bits, true, false, Values::kRandom});
      agrees<float>(kGemv, c, 8);
      agrees<float>(kGemv, c, 1);
    }
  }
}

// The largest sums there can be: they must fit into the fraction of a float, or into 32 bits.
void extreme_codes() {
  for (const Kernel kernel : {kGemv, kSmall}) {
    const std::size_t m = kernel == kGemv ? 8 : 33;
    for (const int bits : {4, 8}) {
      for (const bool zeros : {false, true}) {
        agrees<float>(kernel, Case({m, 256, 35, 128, 128, bits, zeros, false, Values::kExtreme}), m);
      }
      agrees<float>(kernel, Case({3, 65536, 3, 65536, 256, bits, true, false, Values::kExtreme}), 3);
    }
  }
  for (const Kernel kernel : {kMiddle, kLarge}) {
    agrees<float>(kernel, Case({33, 256, 35, 128, 128, 8, true, false, Values::kExtreme}), 33);
  }
}

// Columns of codes that start at multiples of 8 bytes only, up to the last byte of the last one.
void unaligned_columns() {
  for (const Kernel kernel : kCudaProductKernels) {
    const std::size_t m = kernel == kGemv ? 3 : 34;
    agrees<float>(kernel, Case({m, 70, 37, 70, 16, 4, true, true, Values::kRandom}), m);
    agrees<float>(kernel, Case({m, 144, 40, 144, 16, 4, false, true, Values::kRandom}), m);
  }
}

// Weights and zero points that differ from group to group, in the bytes of a group that a stage does not begin with.
void long_rows(Kernel kernel) {
  const std::size_t m = kernel == kGemv ? 2 : 17;
  for (const std::size_t group : {32, 64, 128}) {
    for (const int bits : {4, 8}) {
      const Case c({m, 1888, 18, group, group, bits, bits == 4, false, Values::kRandom});
      agrees<float>(kernel, c, m);
    }
  }
}

// A row that is not finite has the scale NaN and codes of zero; a row of zeros has codes of zero.
void special_rows(Kernel kernel) {
  const std::size_t rows = kernel == kGemv ? 6 : 20;
  for (const std::size_t group : {96, 32}) {
    Case c({rows, 96, 24, group, 32, 4, true, true, Values::kRandom});
    for (const std::size_t m : {0, 3, 5}) {
      std::memset(c.codes.data() + m * c.stride, 0, c.stride);
      for (std::size_t g = 0; g < c.groups; ++g) c.row_sums[m * c.groups + g] = 0;
      for (std::size_t i = 0; i < c.shape.columns * c.groups; ++i) c.sums[m * c.shape.columns * c.groups + i] = 0;
      if (m != 3) c.row_scales[m] = std::numeric_limits<float>::quiet_NaN();
    }
    agrees<Half>(kernel, c, rows);
    agrees<float>(kernel, c, rows);
  }
}

// Codes of a row and their zeros end where the next multiple of 64 does; what follows is not read.
void padded_rows() {
  for (const Kernel kernel : kCudaProductKernels) {
    const std::size_t m = kernel == kGemv ? 5 : 19;
    Case c({m, 70, 20, 70, 32, 4, false, true, Values::kRandom});
    std::vector<std::int8_t> apart(m * (c.stride + 64), 99);
    for (std::size_t row = 0; row < m; ++row) {
      std::memcpy(apart.data() + row * (c.stride + 64), c.codes.data() + row * c.stride, c.stride);
    }
    c.codes = apart;
    c.stride += 64;
    agrees<float>(kernel, c, m);
  }
}

// Codes as the kernel for rows leaves them, in the order that the product takes them in.
void codes_of_rows() {
  for (const int bits : {4, 8}) {
    constexpr std::size_t kRows = 5, kChannels = 104, kColumns = 10, kGroup = 32;
    const Case c({kRows, kChannels, kColumns, kGroup, kGroup, bits, true, false, Values::kRandom});
    OnDevice device(c, false);
    shim::Guarded<float> x(kRows * kChannels), out(kRows * kColumns);
    Random random(7);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = random.between(-1.0f, 1.0f);
    rows_cuda({nullptr, kChannels, kGroup, 127, bits == 4}, Element::kFloat, x.data(), kRows, device.rows, nullptr);
    product_cuda(device.product, device.rows, Element::kFloat, kRows, out.data(), nullptr, nullptr);
    for (std::size_t m = 0; m < kRows; ++m) {
      for (std::size_t n = 0; n < kColumns; ++n) {
        const float scale = device.row_scales[m];
        double sum = 0;
        for (std::size_t k = 0; k < kChannels; ++k) {
          const std::size_t group = n * c.groups + k / kGroup;
          const double weight = c.scales[group] * (c.weights[n * kChannels + k] - c.zeros[group]);
          sum += std::nearbyint(static_cast<double>(x[m * kChannels + k]) / scale) * weight;
        }
        const double got = out[m * kColumns + n], wanted = sum * scale;
        EXPECT(std::fabs(got - wanted) < 1e-4, "bits %d: [%zu, %zu] is %.9g, not %.9g", bits, m, n, got, wanted);
      }
    }
  }
}

// More rows than one band of tiles.
void many_rows() { agrees<Half>(kSmall, Case({2085, 32, 40, 32, 32, 4, false, true, Values::kRandom}), 2085); }

void chosen() {
  const auto choose = [](std::size_t rows, std::size_t channels, std::size_t columns, std::size_t group) {
    const CudaProduct product{channels, columns, group, channels / group, group, 4, 8, nullptr, nullptr, true, nullptr,
                              nullptr};
    const CudaDevice h100 = {9, 0, 132, 232448};
    return choose_cuda_product(product, rows, h100);
  };
  EXPECT(choose(1, 4096, 4096, 4096) == kGemv && choose(8, 4096, 4096, 128) == kGemv, "few rows");
  EXPECT(choose(9, 4096, 4096, 4096) == kSmall && choose(64, 4096, 4096, 128) == kSmall, "tens of rows");
  EXPECT(choose(256, 4096, 4096, 4096) == kMiddle && choose(256, 4096, 4096, 128) == kMiddle, "hundreds of rows");
  EXPECT(choose(4096, 4096, 4096, 4096) == kLarge && choose(4096, 4096, 4096, 128) == kLarge, "thousands of rows");
  shim::set_device(kSmallest);  // sixteen warps with codes of eight rows do not fit there
  agrees<float>(kGemv, Case({8, 2048, 24, 32, 32, 4, true, false, Values::kRandom}), 8);
  shim::set_device(kA100);
  Case c({9, 64, 8, 64, 32, 4, false, false, Values::kRandom});
  OnDevice device(c, false);
  shim::Guarded<float> out(9 * 8);
  product_cuda(device.product, device.rows, Element::kFloat, 0, out.data(), nullptr, nullptr);
  EXPECT(std::isnan(out[0]), "no rows, no outputs");
  product_cuda(device.product, device.rows, Element::kFloat, 9, out.data(), nullptr, nullptr);
  EXPECT(out[71] == expected(c, 8, 7), "the kernel that is chosen runs");
}

void refused() {
  const auto words_of = [](const CudaProduct& product, const CudaDevice& device) -> std::string {
    try {
      check_cuda_product(product, device);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  CudaProduct product{64, 8, 64, 1, 32, 4, 8, nullptr, nullptr, false, nullptr, nullptr};
  EXPECT(words_of(product, kA100).empty(), "%s", words_of(product, kA100).c_str());
  const std::string old = words_of(product, {7, 5, 40, 65536});
  EXPECT(old.find("8.0") != std::string::npos && old.find("7.5") != std::string::npos, "%s", old.c_str());
  product.bits = 3;
  EXPECT(words_of(product, kA100).find("'bits'") != std::string::npos, "bits");
  product.bits = 4, product.channels = std::size_t{1} << 21, product.group = product.block = 128;
  EXPECT(words_of(product, kA100).find("1048576 channels") != std::string::npos, "too many channels");
}

}  // namespace

int main() {
  shim::set_device(kA100);
  shapes(kGemv, {1, 4, 5, 8, 3}, {16, 24, 33, 7}, {31, 96, 161, 576});
  shapes(kSmall, {9, 33, 40, 31}, {32, 40, 35, 7, 72}, {3, 64, 161, 576});
  shapes(kMiddle, {64, 67, 30}, {128, 136, 133}, {96, 200});
  shapes(kLarge, {130, 128, 77}, {136, 264, 133}, {160});
  few_rows();
  extreme_codes();
  unaligned_columns();
  for (const Kernel kernel : kCudaProductKernels) long_rows(kernel);
  for (const Kernel kernel : kCudaProductKernels) special_rows(kernel);
  padded_rows();
  codes_of_rows();
  many_rows();
  chosen();
  refused();
  return test::failures == 0 ? 0 : 1;
}
