// Rows to integers by the CUDA kernel, against the definition in double and against the CPU's kernel: transforms, groups
// of every kind, both orders of codes, odd numbers of rows, beside guard bytes, and rows that are zero, huge or not
// finite.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_on_cpu/guarded.h"
#include "matmul/rows.h"
#include "matmul/rows_cuda.h"
#include "tests/check.h"
#include "tests/special_rows.h"
#include "tests/transforms.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

struct Case {
  std::size_t channels, rows;
  std::size_t order = 1, width = 0;  // width 0: no transform
  std::size_t group = 0;             // 0: all channels
  int levels = 127;
  bool interleaved = false, hartley = false;
  double scale = 0;                  // of the transform; 0: the orthonormal one

  std::size_t group_size() const { return group == 0 ? channels : group; }
  std::size_t groups() const { return (channels + group_size() - 1) / group_size(); }
  std::vector<float> factor() const { return hartley ? graphrot::test::hartley(order) : hadamard(order); }
  float transform_scale() const {
    return static_cast<float>(scale != 0 ? scale : 1.0 / std::sqrt(static_cast<double>(order * width)));
  }
};

struct Result {
  std::vector<int> codes;  // [rows][channels], in the order of the channels
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
};

// Of 32 channels the even ones come first.
constexpr std::size_t interleaved_place(std::size_t i) { return i / 32 * 32 + i % 2 * 16 + i % 32 / 2; }

template <class T>
std::vector<T> elements(const std::vector<double>& x) {
  std::vector<T> out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) from_float(static_cast<float>(x[i]), &out[i]);
  return out;
}

template <class T>
Result run(const Case& c, const std::vector<double>& x) {
  const std::size_t padded = rows_stride(c.channels), stride = padded + (c.rows % 2) * kRowAlignment;
  std::unique_ptr<HadamardTransform> host;
  if (c.width != 0) {
    host = std::make_unique<HadamardTransform>(static_cast<std::int64_t>(c.order * c.width), c.factor(),
                                               static_cast<std::int64_t>(c.order), c.transform_scale());
  }
  const shim::Guarded<std::uint8_t> factor(c.width == 0 ? std::vector<std::uint8_t>{} : cuda_factor(c.order, c.factor()));
  CudaHadamard rotation{};
  if (host != nullptr) rotation = cuda_hadamard(host->problem(), factor.data());
  const CudaRowsProblem problem{host == nullptr ? nullptr : &rotation, c.channels, c.group_size(), c.levels, c.interleaved};
  check_cuda_rows(problem, current_device());
  const shim::Guarded<T> in(elements<T>(x));
  shim::Guarded<std::int8_t> codes(stride * (c.rows - 1) + padded);
  shim::Guarded<float> scales(c.rows);
  shim::Guarded<std::int32_t> sums(c.rows * c.groups());
  std::memset(codes.data(), 0x5a, codes.size());
  rows_cuda(problem, Kind<T>::element, in.data(), c.rows, {codes.data(), stride, scales.data(), sums.data()}, nullptr);
  EXPECT(in.kept() && codes.kept() && scales.kept() && sums.kept() && factor.kept(), "guard bytes, channels %zu",
         c.channels);
  Result result;
  for (std::size_t row = 0; row < c.rows; ++row) {
    const std::int8_t* const from = codes.data() + row * stride;
    for (std::size_t i = 0; i < c.channels; ++i) {
      result.codes.push_back(from[c.interleaved ? interleaved_place(i) : i]);
    }
    bool zero = true, between = true;
    for (std::size_t i = 0; i < padded; ++i) {
      const std::size_t place = c.interleaved ? interleaved_place(i) : i;
      zero = zero && (i < c.channels || from[place] == 0);
    }
    for (std::size_t i = padded; i < stride && row + 1 < c.rows; ++i) between = between && from[i] == 0x5a;
    EXPECT(zero && between, "codes after the last channel are zero, and bytes between rows left alone");
    result.scales.push_back(scales[row]);
    for (std::size_t g = 0; g < c.groups(); ++g) {
      std::int32_t sum = 0;
      for (std::size_t i = g * c.group_size(); i < c.channels && i < (g + 1) * c.group_size(); ++i) {
        sum += result.codes[row * c.channels + i];
      }
      result.sums.push_back(sums[row * c.groups() + g]);
      EXPECT(result.sums.back() == sum, "the sum of group %zu of %zu, row %zu", g, c.groups(), row);
    }
  }
  return result;
}

// By the CPU's kernel for every machine.
template <class T>
Result run_on_cpu(const Case& c, const std::vector<double>& x) {
  std::unique_ptr<HadamardTransform> host;
  if (c.width != 0) {
    host = std::make_unique<HadamardTransform>(static_cast<std::int64_t>(c.order * c.width), c.factor(),
                                               static_cast<std::int64_t>(c.order), c.transform_scale());
  }
  const RowsProblem problem{host == nullptr ? nullptr : &host->problem(), c.channels, c.group_size(), c.levels};
  const std::size_t stride = rows_stride(c.channels);
  std::vector<std::int8_t> codes(stride * c.rows);
  Result result{{}, std::vector<float>(c.rows), std::vector<std::int32_t>(c.rows * c.groups())};
  std::vector<float> scratch(rows_scratch_floats(problem));
  const std::vector<T> in = elements<T>(x);
  rows_scalar().run[static_cast<int>(Kind<T>::element)](
      problem, in.data(), c.rows, {codes.data(), stride, result.scales.data(), result.sums.data()}, scratch.data());
  for (std::size_t row = 0; row < c.rows; ++row) {
    for (std::size_t i = 0; i < c.channels; ++i) result.codes.push_back(codes[row * stride + i]);
  }
  return result;
}

// Codes may differ by one where the quotient is a tie within the rounding of float.
template <class T>
void agrees(const Case& c, const std::vector<double>& x) {
  std::vector<double> z = x;
  if (c.width != 0) z = transformed(x, c.factor(), c.order, c.width, static_cast<double>(c.transform_scale()));
  const Result got = run<T>(c, x);
  // Errors relative to the largest of a row: a sum's order and the rounding of the scale.
  double depth = 0;
  if (c.width != 0) depth = std::sqrt(static_cast<double>(c.order)) + std::log2(static_cast<double>(c.width));
  const double relative = (2 + depth) * 1.2e-7;
  for (std::size_t row = 0; row < c.rows; ++row) {
    double largest = static_cast<double>(kRowEpsilon);
    for (std::size_t i = 0; i < c.channels; ++i) largest = std::fmax(largest, std::fabs(z[row * c.channels + i]));
    const double scale = largest / c.levels;
    EXPECT(std::fabs(static_cast<double>(got.scales[row]) - scale) <= relative * scale,
           "order %zu, width %zu, row %zu: scale %g, not %g", c.order, c.width, row,
           static_cast<double>(got.scales[row]), scale);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < c.channels; ++i) {
      const int code = got.codes[row * c.channels + i];
      const double quotient = z[row * c.channels + i] / scale;
      if (std::fabs(code - quotient) > 0.5 + 2 * relative * c.levels || std::abs(code) > c.levels) ++wrong;
    }
    EXPECT(wrong == 0, "order %zu, width %zu, channels %zu, levels %d, row %zu: %zu wrong codes", c.order, c.width,
           c.channels, c.levels, row, wrong);
  }
  // With no factor and additions in the same order, all is as on the CPU to the bit.
  if (c.order > 1 || c.width > 256) return;
  const Result cpu = run_on_cpu<T>(c, x);
  EXPECT(got.codes == cpu.codes && got.sums == cpu.sums && got.scales == cpu.scales,
         "width %zu, channels %zu: not the CPU's codes", c.width, c.channels);
}

template <class T>
std::vector<double> values(const Case& c) {
  Random random(c.channels * 31 + c.rows);
  std::vector<double> x(c.rows * c.channels);
  for (double& value : x) value = random.next();
  return rounded<T>(x);
}

template <class T>
void agrees(const Case& c) {
  agrees<T>(c, values<T>(c));
}

template <class T>
void all_shapes() {
  // No transform: around every edge of the codes' alignment and of a warp; groups of a warp's lanes, and others.
  for (const std::size_t channels : {1, 7, 8, 15, 31, 33, 63, 64, 65, 200, 255, 256, 264, 576, 1000, 2304}) {
    for (const std::size_t group : {0, 8, 32, 64, 128, 256, 512, 12}) {
      const bool interleaved = group % 3 == 2;
      agrees<T>({channels, 1 + group / 32 % 3, 1, 0, group, channels % 2 == 0 ? 127 : 7, interleaved});
    }
  }
  for (std::size_t width = 1; width <= 16384; width *= 2) {
    agrees<T>({width, 2, 1, width, 128, 127, true});
    if (width <= 2048) agrees<T>({3 * width, 3, 1, width, 64, 127});
  }
  for (const std::size_t width : {1, 2, 4, 8, 16, 64}) {
    for (const std::size_t blocks : {1, 3}) {
      agrees<T>({blocks * 12 * width, 2, 12, width, 32, 127, true});
      agrees<T>({blocks * 5 * width, 1, 5, width, 0, 7, false, true});
    }
  }
  agrees<T>({576, 3, 36, 16, 64, 127, true});
  agrees<T>({14336, 1, 28, 512, 128});
}

void model_sizes() {
  agrees<float>({1536, 5, 12, 128, 32});
  agrees<Half>({4864, 1, 76, 64, 64, 7, true});
  agrees<Half>({13696, 1, 107, 128, 0, 127, false, true});
  agrees<Half>({18944, 1, 148, 128, 0, 127, true});
  agrees<BFloat16>({28672, 1, 28, 1024, 128, 127, true});
  agrees<float>({29568, 1, 924, 32, 64});
  for (const double scale : {1e30, 1.0, 1e-6, 1e-30}) agrees<float>({3072, 2, 12, 128, 128, 127, false, false, scale});
}

template <class T>
void all_special_rows(double huge) {
  for (const std::size_t width : {0, 2, 16, 64}) {
    for (const std::size_t group : {0, 32}) {
      const Case c{12 * (width == 0 ? 10 : width) * 2, kSpecialRows, 12, width, group};
      const std::vector<double> finite = special_rows(values<T>(c), c.channels, huge, &rounded<T>);
      agrees<T>(c, finite);
      check_special_rows("width " + std::to_string(width), run<T>(c, not_finite(finite, c.channels)),
                         run<T>(c, finite), c.channels);
    }
  }
}

void refusals() {
  const CudaHadamard rotation{1024, 1, 10, 1.0f, nullptr};
  std::string said;
  try {
    check_cuda_rows({&rotation, 28672, 128, 127, false}, {8, 6, 1, 99 * 1024});
  } catch (const std::invalid_argument& error) {
    said = error.what();
  }
  EXPECT(said == "attribute 'K' is 28672: on CUDA such a rotated row takes 114816 bytes of a block's shared memory, and "
                 "this device has 101376", "%s", said.c_str());
  check_cuda_rows({nullptr, 1 << 20, 128, 127, false}, {8, 6, 1, 99 * 1024});
}

}  // namespace

int main() {
  all_shapes<float>();
  all_shapes<Half>();
  all_shapes<BFloat16>();
  model_sizes();
  all_special_rows<float>(1e36);  // 24 * 64 of them are beyond the largest float, times the scale they are not
  all_special_rows<Half>(65504);
  all_special_rows<BFloat16>(std::ldexp(1.0, 120));
  refusals();
  return test::failures == 0 ? 0 : 1;
}
