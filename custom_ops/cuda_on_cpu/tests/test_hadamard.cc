// The transform's CUDA kernels against the definition in double: every construction of the factor, sizes around every
// edge between registers, lanes, warps and blocks, sizes of real models, in place and apart, beside guard bytes.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_on_cpu/guarded.h"
#include "hadamard/cuda.h"
#include "hadamard/hadamard.h"
#include "tests/check.h"
#include "tests/transforms.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

struct Case {
  std::size_t order, levels, blocks;
  bool hartley = false;
  std::size_t shift = 0;  // elements after the last aligned place

  std::size_t size() const { return order << levels; }
  float scale() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(size()))); }
  std::vector<float> factor() const { return hartley ? graphrot::test::hartley(order) : hadamard(order); }
};

// One transform's memory "on the device".
class Uploaded {
 public:
  explicit Uploaded(const Case& c)
      : host_(static_cast<std::int64_t>(c.size()), c.factor(), static_cast<std::int64_t>(c.order), c.scale()),
        factor_(cuda_factor(c.order, c.factor())) {}
  const HadamardTransform& host() const { return host_; }
  CudaHadamard device() const { return cuda_hadamard(host_.problem(), factor_.size() == 0 ? nullptr : factor_.data()); }
  bool kept() const { return factor_.kept(); }

 private:
  HadamardTransform host_;
  shim::Guarded<std::uint8_t> factor_;
};

template <class T>
std::vector<T> run(const Uploaded& transform, const Case& c, const std::vector<double>& x, bool in_place) {
  shim::Guarded<T> in(x.size() + c.shift), out(x.size() + c.shift);
  for (std::size_t i = 0; i < x.size(); ++i) from_float(static_cast<float>(x[i]), &in[c.shift + i]);
  const std::vector<T> before(in.data(), in.data() + in.size());
  shim::Guarded<T>& result = in_place ? in : out;
  hadamard_cuda(transform.device(), Kind<T>::element, in.data() + c.shift, result.data() + c.shift, c.blocks, nullptr);
  EXPECT(in.kept() && out.kept() && transform.kept(), "guard bytes, order %zu, levels %zu", c.order, c.levels);
  if (!in_place) EXPECT(std::memcmp(in.data(), before.data(), in.size() * sizeof(T)) == 0, "the input is left alone");
  return std::vector<T>(result.data() + c.shift, result.data() + result.size());
}

template <class T>
void agrees(const Case& c) {
  const Uploaded transform(c);
  check_cuda_hadamard(c.size(), c.order, current_device());
  Random random(c.size() * 31 + c.blocks);
  std::vector<double> x(c.size() * c.blocks);
  for (double& value : x) value = random.next();
  x = rounded<T>(x);
  const std::vector<double> expected = transformed(x, c.factor(), c.order, std::size_t{1} << c.levels, c.scale());
  // Values are below 6. Sums of `order` terms are taken one after the other, each rounded in float.
  const double tolerance = 6 * Kind<T>::rounding + 6 * 1.2e-7 * std::sqrt(static_cast<double>(c.order + c.levels));
  for (const bool in_place : {false, true}) {
    const std::vector<T> got = run<T>(transform, c, x, in_place);
    double error = 0;
    for (std::size_t i = 0; i < x.size(); ++i) error = std::fmax(error, std::fabs(to_float(got[i]) - expected[i]));
    EXPECT(error <= tolerance, "order %zu, levels %zu, blocks %zu: error %g over %g", c.order, c.levels, c.blocks, error,
           tolerance);
    // Additions in the same order, and no factor: the same bits as on the CPU.
    if (c.order > 1 || c.levels > 8) continue;
    std::vector<T> in(x.size()), out(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) from_float(static_cast<float>(x[i]), &in[i]);
    std::vector<float> scratch(transform.host().scratch_floats());
    hadamard_scalar().run[static_cast<int>(Kind<T>::element)](transform.host().problem(), in.data(), out.data(), c.blocks,
                                                              scratch.data());
    EXPECT(std::memcmp(got.data(), out.data(), out.size() * sizeof(T)) == 0, "levels %zu: not the CPU's bits", c.levels);
  }
}

template <class T>
void agrees_everywhere() {
  for (std::size_t levels = 0; levels <= 14; ++levels) {
    for (const std::size_t blocks : {1, 3, 17}) {
      if ((blocks << levels) > 40000) continue;
      agrees<T>({1, levels, blocks});
    }
  }
  for (const std::size_t levels : {0, 1, 2, 3, 5}) {
    for (const std::size_t blocks : {1, 7}) {
      agrees<T>({12, levels, blocks});
      agrees<T>({20, levels, blocks});
      agrees<T>({5, levels, blocks, true});
    }
  }
  agrees<T>({1, 4, 5, false, 1});   // not aligned to 16 bytes
  agrees<T>({12, 3, 9, false, 1});
  agrees<T>({36, 4, 4});            // 576
  agrees<T>({28, 9, 2});            // 14336
}

// Sizes of models' layers, and every order that the converter makes.
void model_sizes() {
  agrees<float>({1, 15, 1});         // 32768
  agrees<float>({76, 6, 1});         // 4864
  agrees<float>({84, 6, 1});         // 5376
  agrees<float>({44, 7, 1});         // 5632
  agrees<float>({76, 7, 1});         // 9728
  agrees<float>({172, 6, 1});        // 11008
  agrees<float>({107, 7, 1, true});  // 13696: no Hadamard factor is known
  agrees<float>({68, 8, 1});         // 17408
  agrees<float>({148, 7, 1});        // 18944
  agrees<float>({100, 8, 1});        // 25600
  agrees<float>({28, 10, 1});        // 28672
  agrees<float>({924, 5, 1});        // 29568
  for (const std::size_t order : kHadamardOrders) agrees<float>({order, order > 200 ? std::size_t{2} : std::size_t{4}, 1});
  for (const std::size_t order : {3, 9, 33}) agrees<float>({order, 6, 2, true});
  agrees<float>({12, 11, 1});  // as many levels as a warp takes, and more, in front of a factor
  agrees<float>({12, 12, 1});
}

// A kernel that takes the factor's transpose is seen by these tests.
void mutants_are_seen() {
  const Case c{12, 3, 1};
  std::vector<float> transposed(144);
  for (std::size_t i = 0; i < 144; ++i) transposed[i] = c.factor()[(i % 12) * 12 + i / 12];
  std::vector<double> x(96);
  for (std::size_t i = 0; i < 96; ++i) x[i] = static_cast<double>(i % 7);
  const std::vector<double> wrong = transformed(x, transposed, 12, 8, c.scale());
  const std::vector<float> got = run<float>(Uploaded(c), c, x, false);
  double error = 0;
  for (std::size_t i = 0; i < 96; ++i) error = std::fmax(error, std::fabs(to_float(got[i]) - wrong[i]));
  EXPECT(error > 0.1, "a transposed factor differs");
}

void not_finite() {
  const Case c{12, 4, 5};
  const Uploaded transform(c);
  std::vector<double> x(c.size() * c.blocks, 1.0);
  x[c.size() + 5] = std::nan("");
  x[3 * c.size()] = std::numeric_limits<double>::infinity();
  const std::vector<Half> got = run<Half>(transform, c, x, true);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const bool bad = i / c.size() == 1 || i / c.size() == 3;
    EXPECT(std::isfinite(to_float(got[i])) != bad, "element %zu", i);
  }
}

void refusals() {
  const auto said = [](std::size_t size, std::size_t order, std::size_t shared_bytes) {
    try {
      check_cuda_hadamard(size, order, {8, 9, 1, shared_bytes});
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT(said(28672, 28, 227 * 1024).empty() && said(2048, 1, 0).empty(), "what fits");
  EXPECT(said(28672, 28, 99 * 1024) == "attribute 'size' is 28672: on CUDA such a transform takes 114688 bytes of a "
                                       "block's shared memory, and this device has 101376",
         "too large: %s", said(28672, 28, 99 * 1024).c_str());
  EXPECT(said(1539, 1539, 227 * 1024) == "attribute 'factor' has order 1539; on CUDA it is at most 1536", "%s",
         said(1539, 1539, 227 * 1024).c_str());
}

}  // namespace

int main() {
  agrees_everywhere<float>();
  agrees_everywhere<Half>();
  agrees_everywhere<BFloat16>();
  model_sizes();
  mutants_are_seen();
  not_finite();
  refusals();
  return test::failures == 0 ? 0 : 1;
}
