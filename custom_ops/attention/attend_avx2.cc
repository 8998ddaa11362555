// AVX2 with FMA and F16C: pairs of products of 16 bits. This file alone is compiled for them; the rules of
// hadamard/avx2.cc hold here too.
#include "common/isa.h"

#if GRAPHROT_X86

#include "attention/attend_panel.h"
#include "hadamard/vector_avx2.h"

namespace graphrot {
namespace {

struct Lanes256 {
  using Float = Avx2;
  using Int = __m256i;
  using Mask = __m256;  // all bits of a lane
  static constexpr std::size_t kLanes = 8;
  static constexpr int kColumns = 2;   // of a tile with two rows
  static constexpr int kFewRows = 0;   // too few registers

  static Float set(float value) { return Float::broadcast(value); }
  static Float load(const float* from) { return Float::load(from); }
  static void store(float* to, Float v) { v.store(to); }
  static void store_bytes(std::uint8_t* to, Int v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }

  static Int load_bytes(const std::uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static void prefetch(const std::uint8_t* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0); }
  static void copy_word(const std::uint8_t* from, std::uint8_t* to) { _mm_storeu_si32(to, _mm_loadu_si32(from)); }

  static Float multiply_add(Float a, Float b, Float c) { return Float::multiply_add(a, b, c); }
  static Float divide(Float a, Float b) { return {_mm256_div_ps(a.v, b.v)}; }
  static Float absolute(Float a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  static Float larger(Float a, Float b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where one is NaN
  static Float smaller(Float a, Float b) { return {_mm256_min_ps(a.v, b.v)}; }
  static float first(Float a) { return _mm256_cvtss_f32(a.v); }

  static float sum(Float a) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
  }
  static float largest(Float a) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
  }

  // Of numbers that are not negative, by their bits: NaN is above infinity.
  static Float larger_or_nan(Float a, Float b) {
    return {_mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a.v), _mm256_castps_si256(b.v)))};
  }
  static float largest_or_nan(Float a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
  }

  static int lanes_before(std::size_t at, std::size_t end) {
    return end <= at ? 0 : static_cast<int>(end - at < kLanes ? end - at : kLanes);
  }
  // Lanes that stand for `from` and on, before `to`; the first lane is `at`.
  static Mask between(std::size_t at, std::size_t from, std::size_t to) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes_before(at, to)), lane);
    const __m256i hidden = _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes_before(at, from)), lane);
    return _mm256_castsi256_ps(_mm256_andnot_si256(hidden, below));
  }
  static Mask above(Float a, Float b) { return _mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ); }
  static Mask differs(Float a, Float b) { return _mm256_cmp_ps(a.v, b.v, _CMP_NEQ_UQ); }
  static Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  static bool any(Mask mask) { return _mm256_movemask_ps(mask) != 0; }
  static Float choose(Mask mask, Float a, Float b) { return {_mm256_blendv_ps(b.v, a.v, mask)}; }
  static Float where(Mask mask, Float a) { return {_mm256_and_ps(mask, a.v)}; }
  static Float load_where(Mask mask, const float* from) {
    return {_mm256_maskload_ps(from, _mm256_castps_si256(mask))};
  }
  static Float multiply_add_where(Mask mask, Float a, Float b, Float c) {
    return {_mm256_blendv_ps(c.v, _mm256_fmadd_ps(a.v, b.v, c.v), mask)};
  }

  // y times two to the whole number in the low bits of `whole`.
  static Float times_power(Float y, Float whole) {
    const __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(whole.v), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y.v), shift))};
  }

  static __m128i row(const std::uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

  // Dwords 0, 1, 2, 3 of eight rows.
  static void columns(const std::uint8_t* rows, std::size_t stride, Int (&out)[4]) {
    Int x[4];
    for (std::size_t i = 0; i < 4; ++i) {
      x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(rows + i * stride)), row(rows + (i + 4) * stride), 1);
    }
    const Int a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    const Int c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
  }

  // Dwords 0 to 7 of eight rows: two pieces.
  static void columns(const std::uint8_t* rows, std::size_t stride, Int (&out)[8]) {
    Int low[4], high[4];
    columns(rows, stride, low);
    columns(rows + kPieceBytes, stride, high);
    for (int k = 0; k < 4; ++k) {
      out[k] = low[k];
      out[k + 4] = high[k];
    }
  }

  static void across(const std::uint8_t* rows, std::size_t stride, Int (&out)[4]) {
    Int low[2], high[2];
    across(rows, stride, low);
    across(rows + kPieceBytes, stride, high);
    for (int v = 0; v < 2; ++v) {
      out[v] = low[v];
      out[v + 2] = high[v];
    }
  }

  // Byte i of four rows in lane i % 8 of vector i / 8.
  static void across(const std::uint8_t* rows, std::size_t stride, Int (&out)[2]) {
    const __m128i a = row(rows), b = row(rows + stride), c = row(rows + 2 * stride), d = row(rows + 3 * stride);
    const auto four = [](__m128i two, __m128i other) {
      return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(two, other)),
                                     _mm_unpackhi_epi16(two, other), 1);
    };
    out[0] = four(_mm_unpacklo_epi8(a, b), _mm_unpacklo_epi8(c, d));
    out[1] = four(_mm_unpackhi_epi8(a, b), _mm_unpackhi_epi8(c, d));
  }

  static Int low_codes(Int v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Int high_codes(Int v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
  static Float low_halves(Int v) { return high_halves(_mm256_slli_epi32(v, 16)); }
  static Float high_halves(Int v) {
    const __m256i halves = _mm256_srli_epi32(v, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed))};
  }

  struct Code {
    __m256i even, odd;
    static Code load(const std::uint8_t* from) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(bytes, 8)};
    }
  };

  // Numbers 0 and 2 of four, 1 and 3.
  struct Number {
    __m256i even, odd;
    static Number load(const std::uint8_t* from, int four) {
      return {_mm256_broadcastd_epi32(_mm_loadu_si32(from + 8 * four)),
              _mm256_broadcastd_epi32(_mm_loadu_si32(from + 8 * four + 4))};
    }
  };

  struct Acc {
    __m256i sum;
    static Acc zero() { return {_mm256_setzero_si256()}; }
    void add(Code code, Number number) {
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(code.even, number.even));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(code.odd, number.odd));
    }
    Float total() const { return {_mm256_cvtepi32_ps(sum)}; }
  };

  static std::int32_t pack_with_sum(const float* from, Float inverse, std::uint8_t* to) {
    const __m256i low = _mm256_cvtps_epi32((load(from) * inverse).v);
    const __m256i high = _mm256_cvtps_epi32((load(from + kLanes) * inverse).v);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m256i pairs = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pairs);
    const __m256i both = _mm256_add_epi32(low, high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  static void pack(const float* from, Float inverse, std::uint8_t* to) { pack_with_sum(from, inverse, to); }
};

}  // namespace

void attend_avx2(const AttendProblem& problem, const AttendTask& task, void* scratch) {
  Panel<Lanes256>(problem, task, scratch).run();
}

}  // namespace graphrot

#endif
