// AVX-512 (F, BW, DQ, VL). This file alone is compiled for it; the rules of hadamard/avx2.cc hold here too.
#include "matmul/rows_panel.h"

#if GRAPHROT_X86

#include "hadamard/vector_avx512.h"

namespace graphrot {
namespace {

struct Avx512Rows {
  using Vector = Avx512;

  static float float_of(std::uint32_t bits) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits))));
  }

  static std::uint32_t bits_of(float value) {
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(value))));
  }

  // Sums of four neighbouring codes each.
  struct Codes {
    __m512i fours;

    template <class T>
    static Codes make(const T* z, Avx512 factor, std::int8_t* codes) {
      const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      __m512i whole[4];
      for (int i = 0; i < 4; ++i) whole[i] = _mm512_cvtps_epi32((Avx512::load(z + 16 * i) * factor).v);
      const __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]),
                                                _mm512_packs_epi32(whole[2], whole[3]));
      const __m512i bytes = _mm512_permutexvar_epi32(order, packed);
      _mm512_storeu_si512(codes, bytes);
      const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi8(1), bytes);
      return {_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))};
    }

    void add(Codes other) { fours = _mm512_add_epi32(fours, other.fours); }

    static std::int32_t reduced(__m256i eight) {
      __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
      four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
      return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
    }

    __m256i first() const { return _mm512_castsi512_si256(fours); }
    __m256i second() const { return _mm512_extracti64x4_epi64(fours, 1); }
    std::int32_t low() const { return reduced(first()); }
    std::int32_t high() const { return reduced(second()); }
    std::int32_t total() const { return reduced(_mm256_add_epi32(first(), second())); }
  };
};

// Where the path of half the width transforms faster (hadamard/avx512.cc), it does all.
template <class T, Element E>
void run(const RowsProblem& problem, const void* in, std::size_t rows, const QuantizedRows& out, float* scratch) {
  const HadamardProblem* const rotation = problem.rotation;
  if (rotation != nullptr && (rotation->group > 1 || (rotation->order > 1 && rotation->sums == nullptr &&
                                                      rotation->levels <= Avx512::kLevels))) {
    return rows_avx2().run[static_cast<int>(E)](problem, in, rows, out, scratch);
  }
  rows::run<Avx512Rows, T>(problem, in, rows, out, scratch);
}

constexpr RowsKernels kKernels = {
    {&run<float, Element::kFloat>, &run<Half, Element::kHalf>, &run<BFloat16, Element::kBFloat16>}};

}  // namespace

const RowsKernels& rows_avx512() { return kKernels; }

}  // namespace graphrot

#endif
