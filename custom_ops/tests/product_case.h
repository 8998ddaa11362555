// A product with everything that goes into it, made from a seed, and its answer by the definition.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "matmul/product.h"
#include "tests/random.h"

namespace graphrot::test {

inline constexpr std::size_t kGuardBytes = 64;

// Bytes at an address that is a multiple of 64, with known ones before and after; nothing more is allocated behind
// the guard, so that the address sanitizer sees what lies beyond.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes), memory_(static_cast<unsigned char*>(allocate(bytes))) {
    std::memset(memory_, 0x5a, bytes + 2 * kGuardBytes);
  }
  ~Guarded() { ::operator delete(memory_, std::align_val_t{64}); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  template <class T>
  T* as() {
    return reinterpret_cast<T*>(memory_ + kGuardBytes);
  }
  bool kept() const {
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      if (memory_[i] != 0x5a || memory_[kGuardBytes + bytes_ + i] != 0x5a) return false;
    }
    return true;
  }

 private:
  static void* allocate(std::size_t bytes) { return ::operator new(bytes + 2 * kGuardBytes, std::align_val_t{64}); }

  std::size_t bytes_;
  unsigned char* memory_;
};

enum class Values { kRandom, kExtreme, kUnitScales };

struct Shape {
  std::size_t rows, channels, columns, group, block;  // group: K for one scale per column
  int bits;
  bool zeros, bias;
  Values values;
};

// Rows, weights in the storage of MatMulNBits, and sums over groups in 64-bit integers.
struct Case {
  explicit Case(const Shape& s) : shape(s) {
    Random random(s.channels * 131 + s.group * 7 + static_cast<std::size_t>(s.bits) + (s.zeros ? 1000 : 0));
    groups = (s.channels + s.group - 1) / s.group;
    stride = rows_stride(s.channels);
    make_rows(&random);
    make_weights(&random);
    sums.assign(s.rows * s.columns * groups, 0);
    for (std::size_t m = 0; m < s.rows; ++m) {
      for (std::size_t n = 0; n < s.columns; ++n) add_up(m, n);
    }
  }

  WeightSource source(std::size_t columns) const {
    return {shape.channels, columns, shape.group, shape.block, shape.bits, storage.data(), scales.data(),
            shape.zeros ? zero_storage.data() : nullptr, shape.bias ? bias.data() : nullptr};
  }
  std::int64_t sum(std::size_t m, std::size_t n, std::size_t g) const {
    return sums[(m * shape.columns + n) * groups + g];
  }

  Shape shape;
  std::size_t groups = 0, stride = 0;
  std::vector<std::int8_t> codes;
  std::vector<float> row_scales, scales, bias;
  std::vector<std::int32_t> row_sums;
  std::vector<std::uint8_t> weights, zeros, storage, zero_storage;  // the first two: one code a byte
  std::vector<std::int64_t> sums;

 private:
  void make_rows(Random* random) {
    codes.assign(shape.rows * stride, 0);
    row_sums.assign(shape.rows * groups, 0);
    for (std::size_t m = 0; m < shape.rows; ++m) {
      for (std::size_t k = 0; k < shape.channels; ++k) {
        int code = static_cast<int>(random->below(255)) - 127;
        if (shape.values == Values::kExtreme) code = m % 3 == 2 ? (code < 0 ? -127 : 127) : m % 3 == 0 ? -127 : 127;
        codes[m * stride + k] = static_cast<std::int8_t>(code);
        row_sums[m * groups + k / shape.group] += code;
      }
      row_scales.push_back(shape.values == Values::kRandom ? random->between(0.001f, 0.1f) : 1.0f);
    }
  }

  void make_weights(Random* random) {
    const std::size_t bits = static_cast<std::size_t>(shape.bits);
    const std::uint32_t levels = 1u << bits;
    const std::size_t blocks = (shape.channels + shape.block - 1) / shape.block;
    const std::size_t padded = blocks * shape.block, zero_row = (blocks * bits + 7) / 8;
    storage.assign(shape.columns * padded * bits / 8, 0);
    zero_storage.assign(shape.columns * zero_row, 0);
    for (std::size_t n = 0; n < shape.columns; ++n) {
      for (std::size_t k = 0; k < padded; ++k) {
        std::uint32_t code = random->below(levels);  // also behind the last channel
        if (shape.values == Values::kExtreme) {
          code = n % 3 == 2 ? (code & 1u) * (levels - 1) : n % 3 == 0 ? levels - 1 : 0;
        }
        if (k < shape.channels) weights.push_back(static_cast<std::uint8_t>(code));
        put(&storage, (n * padded + k) * bits, code);
      }
      const std::uint32_t whole = random->below(levels);
      for (std::size_t b = 0; b < blocks; ++b) {
        const std::uint32_t zero = groups == 1 ? whole : random->below(levels);
        put(&zero_storage, n * zero_row * 8 + b * bits, zero);
        if (b < groups) zeros.push_back(static_cast<std::uint8_t>(shape.zeros ? zero : levels / 2));
      }
      for (std::size_t g = 0; g < groups; ++g) {
        scales.push_back(shape.values == Values::kUnitScales ? 1.0f : random->between(0.001f, 0.1f));
      }
      bias.push_back(random->between(-3.0f, 3.0f));
    }
  }

  static void put(std::vector<std::uint8_t>* to, std::size_t bit, std::uint32_t code) {
    (*to)[bit / 8] = static_cast<std::uint8_t>((*to)[bit / 8] | (code << (bit % 8)));
  }

  void add_up(std::size_t m, std::size_t n) {
    const std::int8_t* a = codes.data() + m * stride;
    const std::uint8_t* w = weights.data() + n * shape.channels;
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t end = std::min(shape.channels, (g + 1) * shape.group);
      const int zero = zeros[n * groups + g];
      std::int32_t sum = 0;  // at most 65536 products below 2^15
      for (std::size_t k = g * shape.group; k < end; ++k) sum += a[k] * (w[k] - zero);
      sums[(m * shape.columns + n) * groups + g] = sum;
    }
  }
};

}  // namespace graphrot::test
