// AVX-512 (F, BW, DQ, VL): pairs of products of 16 bits. This file alone is compiled for it; the rules of
// hadamard/avx2.cc hold here too.
#include "common/isa.h"

#if GRAPHROT_X86

#include "attention/attend_avx512.h"

namespace graphrot {
namespace {

struct Words512 : Lanes512 {
  static constexpr std::size_t kAccVectors = 1;

  struct Code {
    __m512i even, odd;
    static Code load(const std::uint8_t* from) { return of(_mm512_loadu_si512(from)); }
    static Code of(__m512i bytes) {
      return {_mm512_and_si512(bytes, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(bytes, 8)};
    }
  };

  // Numbers 0 and 2 of four, 1 and 3.
  struct Number {
    __m512i even, odd;
    static Number load(const std::uint8_t* from, int four) {
      return {broadcast_dword(from + 8 * four), broadcast_dword(from + 8 * four + 4)};
    }
  };

  struct Acc {
    __m512i sum;
    static Acc zero() { return {_mm512_setzero_si512()}; }
    void add(Code code, Number number) {
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(code.even, number.even));
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(code.odd, number.odd));
    }
    Float total() const { return {_mm512_cvtepi32_ps(sum)}; }
  };

  static __m512i pack_whole(__m512i whole, std::uint8_t* to) {
    const __m256i words = _mm512_cvtepi32_epi16(whole);
    const __m256i pairs = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pairs);
    return whole;
  }
  static void pack(const float* from, Float inverse, std::uint8_t* to) { pack_whole(rounded(from, inverse), to); }
  static std::int32_t pack_with_sum(const float* from, Float inverse, std::uint8_t* to) {
    return _mm512_reduce_add_epi32(pack_whole(rounded(from, inverse), to));
  }
};

}  // namespace

void attend_avx512(const AttendProblem& problem, const AttendTask& task, void* scratch) {
  Panel<Words512>(problem, task, scratch).run();
}

}  // namespace graphrot

#endif
