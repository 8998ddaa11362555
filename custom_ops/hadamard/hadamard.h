// Blockwise transform y = scale * x * (F (x) S): F is a dense factor of order K, S Sylvester's matrix of
// order 2^levels, and a block holds size = K * 2^levels channels, ordered [K, 2^levels].
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/element.h"
#include "common/isa.h"

namespace graphrot {

// What a kernel reads. Plain data: files built for one instruction set must not instantiate library
// templates, which the linker could share with the rest of the program.
struct HadamardProblem {
  std::size_t size;     // channels per block
  std::size_t order;    // K
  std::size_t levels;   // log2(size / K)
  std::size_t group;    // blocks that are worked on together, so that inner loops are never shorter than 16
  float scale;          // first thing that x is multiplied by
  const float* factor;  // F by four columns: [ceil(K / 4)][K][4], padded with zeros; null where there are sums
  // Where K is a multiple of four and entries are +-1, null elsewhere: how F is applied by shared sums of four rows.
  // For each slab of rows: how many fours of rows, then for each row of the result [row, plus, one term per four]: the
  // places of sums in the table, in floats, of which the first `plus` are added and the others subtracted.
  const std::uint16_t* sums;
  std::size_t columns;  // a tile of the table is this many times kSumFloats wide: 1, 2 or 4
};

inline constexpr std::size_t kSumFloats = 16;
inline constexpr std::size_t kSumsOfFour = 8;   // a +- b +- c +- d
inline constexpr std::size_t kSumsInSlab = 12;  // fours of rows at most: the table stays in the first-level cache

// Transforms `blocks` contiguous blocks from `in` to `out`, which are the same buffer or do not overlap.
// `scratch` holds hadamard_scratch_floats() floats, aligned to 64 bytes.
using HadamardRun = void (*)(const HadamardProblem& problem, const void* in, void* out, std::size_t blocks,
                             float* scratch);

struct HadamardKernels {
  HadamardRun run[kElementCount];  // indexed by Element
};

const HadamardKernels& hadamard_scalar();
#if GRAPHROT_X86
const HadamardKernels& hadamard_avx2();
const HadamardKernels& hadamard_avx512();
#endif
const HadamardKernels& hadamard_kernels(Isa isa);

std::size_t hadamard_scratch_floats(const HadamardProblem& problem);

// The problem with the memory that it points to.
class HadamardTransform {
 public:
  // `factor` is row-major [order, order] with F * F^T = order * I. Throws std::invalid_argument, in words for
  // people, when it is not, or when the numbers do not fit together.
  HadamardTransform(std::int64_t size, const std::vector<float>& factor, std::int64_t order, float scale);

  const HadamardProblem& problem() const { return problem_; }
  std::size_t scratch_floats() const { return hadamard_scratch_floats(problem_); }
  // Rough count of additions for one block, for deciding on threads.
  std::size_t work_per_block() const { return problem_.size * (problem_.levels + terms_); }

  HadamardTransform(const HadamardTransform&) = delete;
  HadamardTransform& operator=(const HadamardTransform&) = delete;

 private:
  std::vector<float> packed_;
  std::vector<std::uint16_t> sums_;
  std::size_t terms_ = 0;  // additions of the factor for one result
  HadamardProblem problem_;
};

}  // namespace graphrot
