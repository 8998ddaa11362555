// AVX2. This file alone is compiled for it; the rules of hadamard/avx2.cc hold here too.
#include "matmul/rows_panel.h"

#if GRAPHROT_X86

#include "hadamard/vector_avx2.h"

namespace graphrot {
namespace {

struct Avx2Rows {
  using Vector = Avx2;

  static float float_of(std::uint32_t bits) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits))));
  }

  static std::uint32_t bits_of(float value) {
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(value))));
  }

  // Sums of four neighbouring codes each, of both halves.
  struct Codes {
    __m256i half[2];

    template <class T>
    static Codes make(const T* z, Avx2 factor, std::int8_t* codes) {
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      Codes sum;
      for (int h = 0; h < 2; ++h, z += rows::kHalf, codes += rows::kHalf) {
        __m256i whole[4];
        for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32((Avx2::load(z + 8 * i) * factor).v);
        const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]),
                                                  _mm256_packs_epi32(whole[2], whole[3]));
        const __m256i bytes = _mm256_permutevar8x32_epi32(packed, order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        sum.half[h] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
      }
      return sum;
    }

    void add(const Codes& other) {
      for (int h = 0; h < 2; ++h) half[h] = _mm256_add_epi32(half[h], other.half[h]);
    }

    static std::int32_t reduced(__m256i eight) {
      __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
      four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
      return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
    }

    std::int32_t low() const { return reduced(half[0]); }
    std::int32_t high() const { return reduced(half[1]); }
    std::int32_t total() const { return reduced(_mm256_add_epi32(half[0], half[1])); }
  };
};

constexpr RowsKernels kKernels = rows::kernels<Avx2Rows>();

}  // namespace

const RowsKernels& rows_avx2() { return kKernels; }

}  // namespace graphrot

#endif
