// AVX-512 with VNNI: four products of bytes at once. A 16-bit number is two signed bytes, and has two sums. This file
// alone is compiled for it; the rules of hadamard/avx2.cc hold here too.
#include "common/isa.h"

#if GRAPHROT_X86

#include "attention/attend_avx512.h"

namespace graphrot {
namespace {

struct Vnni : Lanes512 {
  static constexpr std::size_t kAccVectors = 2;

  struct Code {
    __m512i bytes;
    static Code of(__m512i bytes) { return {bytes}; }
    static Code load(const std::uint8_t* from) { return of(_mm512_loadu_si512(from)); }
  };

  // Four numbers: their high bytes, their low bytes.
  struct Number {
    __m512i high, low;
    static Number load(const std::uint8_t* from, int four) {
      return {broadcast_dword(from + 4 * four), broadcast_dword(from + 16 + 4 * four)};
    }
  };

  struct Acc {
    __m512i high, low;
    static Acc zero() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
    void add(Code code, Number number) {
      high = _mm512_dpbusd_epi32(high, code.bytes, number.high);
      low = _mm512_dpbusd_epi32(low, code.bytes, number.low);
    }
    Float total() const {
      return {_mm512_fmadd_ps(_mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low))};
    }
  };

  static __m512i pack_whole(__m512i whole, std::uint8_t* to) {
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_cvtepi32_epi8(whole));
    return whole;
  }
  static void pack(const float* from, Float inverse, std::uint8_t* to) { pack_whole(rounded(from, inverse), to); }
  static std::int32_t pack_with_sum(const float* from, Float inverse, std::uint8_t* to) {
    return _mm512_reduce_add_epi32(pack_whole(rounded(from, inverse), to));
  }
};

}  // namespace

void attend_vnni(const AttendProblem& problem, const AttendTask& task, void* scratch) {
  Panel<Vnni>(problem, task, scratch).run();
}

}  // namespace graphrot

#endif
