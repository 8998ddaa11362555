// The C functions of the benchmarks. Each repeats its work and returns seconds of this thread's CPU time in all; below
// zero: the instruction set is not there.
#include <time.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "bench/peak.h"
#include "common/isa.h"
#include "hadamard/hadamard.h"
#include "matmul/rows.h"

namespace graphrot {
namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

bool find_isa(const char* name, Isa* found) {
  for (const Isa isa : kIsas) {
    if (std::string(name) == isa_name(isa) && isa_available(isa)) {
      *found = isa;
      return true;
    }
  }
  return false;
}

// Memory whose start is a multiple of 64 bytes.
template <class T>
class Aligned {
 public:
  explicit Aligned(std::size_t count) : memory_(count * sizeof(T) + 64) {}
  T* data() {
    auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return reinterpret_cast<T*>((address + 63) / 64 * 64);
  }

 private:
  std::vector<unsigned char> memory_;
};

volatile std::uint64_t sink;

}  // namespace
}  // namespace graphrot

#define MEASURE_EXPORT extern "C" __attribute__((visibility("default")))

using graphrot::Isa;

// Reads the bytes in eight streams at once, which is faster than one: prefetching stops at the end of a page.
MEASURE_EXPORT double measure_read(const std::uint64_t* words, std::size_t count, std::size_t repeat) {
  constexpr std::size_t kStreams = 8, kLine = 8;
  const std::size_t part = count / kStreams / kLine * kLine;
  std::uint64_t sums[kLine] = {};
  const double start = graphrot::now();
  for (std::size_t turn = 0; turn < repeat; ++turn) {
    for (std::size_t at = 0; at < part; at += kLine) {
      for (std::size_t stream = 0; stream < kStreams; ++stream) {
        const std::uint64_t* line = words + stream * part + at;
        for (std::size_t word = 0; word < kLine; ++word) sums[word] ^= line[word];
      }
    }
  }
  const double seconds = graphrot::now() - start;
  for (const std::uint64_t sum : sums) graphrot::sink = sum;
  return seconds;
}

MEASURE_EXPORT double measure_copy(const void* from, void* to, std::size_t bytes, std::size_t repeat) {
  const double start = graphrot::now();
  for (std::size_t turn = 0; turn < repeat; ++turn) {
    std::memcpy(to, from, bytes);
    graphrot::sink = *static_cast<const unsigned char*>(to);
  }
  return graphrot::now() - start;
}

// Multiply-adds of bytes per second; 0 where there is no loop for the instruction set.
MEASURE_EXPORT double measure_peak(const char* isa, std::size_t rounds) {
  Isa found;
  if (!graphrot::find_isa(isa, &found)) return -1;
  const double start = graphrot::now();
  const double made = graphrot::multiply_adds(found, rounds);
  return made / (graphrot::now() - start);
}

// The transform of `rows` rows of `channels` floats, from `in` to `out`.
MEASURE_EXPORT double measure_hadamard(const char* isa, std::size_t channels, std::size_t size, std::size_t order,
                                       const float* factor, float scale, const float* in, float* out,
                                       std::size_t rows, std::size_t repeat) {
  Isa found;
  if (!graphrot::find_isa(isa, &found)) return -1;
  const std::vector<float> matrix(factor, factor + order * order);
  const graphrot::HadamardTransform transform(static_cast<std::int64_t>(size), matrix, static_cast<std::int64_t>(order),
                                              scale);
  graphrot::Aligned<float> scratch(transform.scratch_floats());
  const graphrot::HadamardRun run = graphrot::hadamard_kernels(found).run[static_cast<int>(graphrot::Element::kFloat)];
  const double start = graphrot::now();
  for (std::size_t turn = 0; turn < repeat; ++turn) {
    run(transform.problem(), in, out, rows * channels / size, scratch.data());
  }
  return graphrot::now() - start;
}

// Rows to integers, as in front of the integer product: transformed where `size` is over 1, scaled and rounded.
MEASURE_EXPORT double measure_rows(const char* isa, std::size_t channels, std::size_t size, std::size_t order,
                                   const float* factor, float scale, const float* in, std::size_t rows,
                                   std::size_t repeat) {
  Isa found;
  if (!graphrot::find_isa(isa, &found)) return -1;
  const std::vector<float> matrix(factor, factor + order * order);
  const graphrot::HadamardTransform transform(static_cast<std::int64_t>(size), matrix, static_cast<std::int64_t>(order),
                                              scale);
  const graphrot::RowsProblem problem = {size > 1 ? &transform.problem() : nullptr, channels, channels, 127};
  const std::size_t stride = graphrot::rows_stride(channels);
  graphrot::Aligned<std::int8_t> codes(rows * stride);
  graphrot::Aligned<float> scales(rows);
  graphrot::Aligned<std::int32_t> sums(rows);
  graphrot::Aligned<float> scratch(graphrot::rows_scratch_floats(problem));
  const graphrot::QuantizedRows result = {codes.data(), stride, scales.data(), sums.data()};
  const graphrot::RowsRun run = graphrot::rows_kernels(found).run[static_cast<int>(graphrot::Element::kFloat)];
  const double start = graphrot::now();
  for (std::size_t turn = 0; turn < repeat; ++turn) run(problem, in, rows, result, scratch.data());
  return graphrot::now() - start;
}
