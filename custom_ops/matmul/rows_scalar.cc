// The path for every machine.
#include "common/element.h"
#include "hadamard/vector_plain.h"
#include "matmul/rows_panel.h"

namespace graphrot {
namespace {

struct PlainRows {
  using Vector = Plain;

  static float float_of(std::uint32_t bits) { return detail::bits_float(bits); }
  static std::uint32_t bits_of(float value) { return detail::float_bits(value); }

  // The sums of codes of both halves.
  struct Codes {
    std::int32_t half[2];

    template <class T>
    static Codes make(const T* z, const Plain& factor, std::int8_t* codes) {
      constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: a float beside it is a whole number, rounded half to even
      Codes sum = {{0, 0}};
      for (std::size_t i = 0; i < rows::kChunk; ++i) {
        const std::uint32_t bits = detail::float_bits(to_float(z[i]) * factor.lane[0] + kWhole);
        codes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(bits - detail::float_bits(kWhole)));
        sum.half[i / rows::kHalf] += codes[i];
      }
      return sum;
    }

    void add(const Codes& other) {
      half[0] += other.half[0];
      half[1] += other.half[1];
    }

    std::int32_t low() const { return half[0]; }
    std::int32_t high() const { return half[1]; }
    std::int32_t total() const { return half[0] + half[1]; }
  };
};

constexpr RowsKernels kKernels = rows::kernels<PlainRows>();

}  // namespace

const RowsKernels& rows_scalar() { return kKernels; }

}  // namespace graphrot
