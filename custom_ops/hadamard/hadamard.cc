#include "hadamard/hadamard.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace graphrot {
namespace {

constexpr std::size_t kPanel = 16;   // shortest inner loop, in floats
constexpr std::size_t kColumns = 4;  // columns of the factor that are packed together
constexpr std::size_t kMostRows = 65535;  // that a plan can name
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

// Which of the eight sums of mix.h has these signs after the first, which is a plus.
std::size_t sum_of_signs(bool b, bool c, bool d) {
  constexpr std::size_t kByLastTwo[2][2] = {{0, 1}, {2, 3}};
  return (b ? 4 : 0) + kByLastTwo[c ? 1 : 0][c == d ? (c ? 1 : 0) : (c ? 0 : 1)];
}

// The plan that HadamardProblem describes, or nothing where the factor is not of that kind.
std::vector<std::uint16_t> plan_sums(const std::vector<float>& factor, std::size_t order, std::size_t columns) {
  std::vector<std::uint16_t> plan;
  bool signs = order > 0 && order % 4 == 0 && order <= kMostRows;
  for (const float entry : factor) signs = signs && (entry == 1.0f || entry == -1.0f);
  if (!signs) return plan;
  const std::size_t quads = order / 4, slabs = (quads + kSumsInSlab - 1) / kSumsInSlab;
  std::vector<std::vector<std::uint16_t>> rows(order);
  for (std::size_t slab = 0; slab < slabs; ++slab) {
    const std::size_t first = quads * slab / slabs, last = quads * (slab + 1) / slabs;
    plan.push_back(static_cast<std::uint16_t>(last - first));
    for (std::size_t row = 0; row < order; ++row) {
      std::vector<std::uint16_t> minus;
      rows[row] = {static_cast<std::uint16_t>(row), 0};
      for (std::size_t quad = first; quad < last; ++quad) {
        bool negative[4];
        for (std::size_t i = 0; i < 4; ++i) negative[i] = factor[(4 * quad + i) * order + row] < 0;
        const bool flip = negative[0];
        const std::size_t sum = sum_of_signs(negative[1] != flip, negative[2] != flip, negative[3] != flip);
        const std::size_t place = ((quad - first) * kSumsOfFour + sum) * columns * kSumFloats;
        (flip ? minus : rows[row]).push_back(static_cast<std::uint16_t>(place));
      }
      rows[row][1] = static_cast<std::uint16_t>(rows[row].size() - 2);
      rows[row].insert(rows[row].end(), minus.begin(), minus.end());
    }
    // Rows with as many terms to add stand together, so that branches are foreseen.
    std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a[1] < b[1]; });
    for (const auto& row : rows) plan.insert(plan.end(), row.begin(), row.end());
    std::sort(rows.begin(), rows.end());
  }
  return plan;
}

}  // namespace

HadamardTransform::HadamardTransform(std::int64_t size, const std::vector<float>& factor, std::int64_t order,
                                     float scale)
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
  problem_.size = static_cast<std::size_t>(size);
  problem_.order = k;
  while ((std::int64_t{1} << problem_.levels) < width) ++problem_.levels;
  problem_.group = static_cast<std::size_t>(width) >= kPanel ? 1 : kPanel / static_cast<std::size_t>(width);
  problem_.scale = k == 1 ? scale * factor[0] : scale;  // a factor of order 1 is a sign
  const std::size_t stride = problem_.group << problem_.levels;
  problem_.columns = stride >= 4 * kSumFloats ? 4 : stride / kSumFloats;
  sums_ = plan_sums(factor, k, problem_.columns);
  if (!sums_.empty()) {
    problem_.sums = sums_.data();
    terms_ = k / 4 + 3;
    return;
  }
  terms_ = k;
  const std::size_t groups = (k + kColumns - 1) / kColumns;
  packed_.assign(groups * k * kColumns, 0.0f);
  for (std::size_t row = 0; row < k; ++row) {
    for (std::size_t column = 0; column < k; ++column) {
      packed_[((column / kColumns) * k + row) * kColumns + column % kColumns] = factor[row * k + column];
    }
  }
  problem_.factor = packed_.data();
}

std::size_t hadamard_scratch_floats(const HadamardProblem& problem) {
  const std::size_t panel = problem.size * problem.group;
  if (problem.sums == nullptr) return 2 * panel;
  const std::size_t tile = problem.columns * kSumFloats;
  return panel + (kSumsInSlab * kSumsOfFour + problem.order) * tile;
}

const HadamardKernels& hadamard_kernels(Isa isa) {
#if GRAPHROT_X86
  if (isa >= Isa::kAvx512) return hadamard_avx512();  // what comes after it has it too
  if (isa == Isa::kAvx2) return hadamard_avx2();
#endif
  (void)isa;
  return hadamard_scalar();
}

}  // namespace graphrot
