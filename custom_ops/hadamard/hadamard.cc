#include "hadamard/hadamard.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace graphrot {
namespace {

constexpr std::size_t kPanel = 16;   // shortest inner loop, in floats
constexpr std::size_t kColumns = 4;  // columns of the factor that are packed together
constexpr std::int64_t kLargestSize = std::int64_t{1} << 24;

void check_orthogonal(const std::vector<float>& factor, std::size_t order) {
  // Freivalds' check, O(K^2): F^T (F v) == K v for random v of +-1. A wrong matrix escapes one probe with
  // probability 1/2 at most, and so all of them with 2^-16.
  constexpr int kProbes = 16;
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  std::vector<double> v(order), product(order), back(order);
  for (int probe = 0; probe < kProbes; ++probe) {
    for (double& entry : v) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      entry = (state >> 63) != 0 ? 1.0 : -1.0;
    }
    back.assign(order, 0.0);
    for (std::size_t r = 0; r < order; ++r) {
      double sum = 0.0;
      for (std::size_t c = 0; c < order; ++c) sum += static_cast<double>(factor[r * order + c]) * v[c];
      for (std::size_t c = 0; c < order; ++c) back[c] += static_cast<double>(factor[r * order + c]) * sum;
    }
    const double k = static_cast<double>(order);
    for (std::size_t c = 0; c < order; ++c) {
      if (!(std::fabs(back[c] - k * v[c]) <= 1e-5 * k * std::sqrt(k))) {
        throw std::invalid_argument("attribute 'factor' is not orthogonal: factor * factor^T must be " +
                                    std::to_string(order) + " * I");
      }
    }
  }
}

}  // namespace

HadamardTransform::HadamardTransform(std::int64_t size, const std::vector<float>& factor, std::int64_t order, float scale)
    : problem_{} {
  if (size < 1 || size > kLargestSize) {
    throw std::invalid_argument("attribute 'size' is " + std::to_string(size) + "; it must be from 1 to " +
                                std::to_string(kLargestSize));
  }
  if (order < 1 || static_cast<std::uint64_t>(order) * static_cast<std::uint64_t>(order) != factor.size()) {
    throw std::invalid_argument("attribute 'factor' must be a square matrix");
  }
  const std::int64_t width = size / order;
  if (width < 1 || width * order != size || (width & (width - 1)) != 0) {
    throw std::invalid_argument("attribute 'size' is " + std::to_string(size) + ", which is not the order " +
                                std::to_string(order) + " of the factor times a power of two");
  }
  if (!(scale > 0.0f) || !std::isfinite(scale)) {
    throw std::invalid_argument("attribute 'scale' must be a positive number");
  }
  const auto k = static_cast<std::size_t>(order);
  check_orthogonal(factor, k);
  const std::size_t groups = (k + kColumns - 1) / kColumns;
  packed_.assign(groups * k * kColumns, 0.0f);
  for (std::size_t row = 0; row < k; ++row) {
    for (std::size_t column = 0; column < k; ++column) {
      packed_[((column / kColumns) * k + row) * kColumns + column % kColumns] = factor[row * k + column];
    }
  }
  problem_.size = static_cast<std::size_t>(size);
  problem_.order = k;
  while ((std::int64_t{1} << problem_.levels) < width) ++problem_.levels;
  problem_.group = static_cast<std::size_t>(width) >= kPanel ? 1 : kPanel / static_cast<std::size_t>(width);
  problem_.scale = k == 1 ? scale * factor[0] : scale;  // a factor of order 1 is a sign
  problem_.factor = packed_.data();
}

const HadamardKernels& hadamard_kernels(Isa isa) {
#if GRAPHROT_X86
  if (isa >= Isa::kAvx512) return hadamard_avx512();
  if (isa == Isa::kAvx2) return hadamard_avx2();
#endif
  (void)isa;
  return hadamard_scalar();
}

}  // namespace graphrot
