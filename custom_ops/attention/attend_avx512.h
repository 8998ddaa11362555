// The policy of attend_panel.h with 512-bit vectors, but for the product. Included by files of one instruction set;
// everything is in an unnamed namespace (see hadamard/avx2.cc).
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attend_panel.h"
#include "hadamard/vector_avx512.h"

namespace graphrot {
namespace {

struct Lanes512 {
  using Float = Avx512;
  using Int = __m512i;
  using Mask = __mmask16;
  static constexpr std::size_t kLanes = 16;
  static constexpr int kColumns = 4;  // of a tile with two rows
  static constexpr int kFewRows = 4;

  static Float set(float value) { return Float::broadcast(value); }
  static Float load(const float* from) { return Float::load(from); }
  static void store(float* to, Float v) { v.store(to); }
  static void store_bytes(std::uint8_t* to, Int v) { _mm512_storeu_si512(to, v); }

  static Int load_bytes(const std::uint8_t* from) { return _mm512_loadu_si512(from); }
  static void prefetch(const std::uint8_t* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0); }
  static void copy_word(const std::uint8_t* from, std::uint8_t* to) { _mm_storeu_si32(to, _mm_loadu_si32(from)); }

  static Float multiply_add(Float a, Float b, Float c) { return Float::multiply_add(a, b, c); }
  static Float divide(Float a, Float b) { return {_mm512_div_ps(a.v, b.v)}; }
  static Float absolute(Float a) { return {_mm512_abs_ps(a.v)}; }
  static Float larger(Float a, Float b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one is NaN
  static Float smaller(Float a, Float b) { return {_mm512_min_ps(a.v, b.v)}; }
  static float first(Float a) { return _mm512_cvtss_f32(a.v); }
  static float sum(Float a) { return _mm512_reduce_add_ps(a.v); }
  static float largest(Float a) { return _mm512_reduce_max_ps(a.v); }

  // Of numbers that are not negative, by their bits: NaN is above infinity.
  static Float larger_or_nan(Float a, Float b) {
    return {_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
  }
  static float largest_or_nan(Float a) {
    const auto bits = static_cast<int>(_mm512_reduce_max_epu32(_mm512_castps_si512(a.v)));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
  }

  static Mask up_to(std::size_t count) { return static_cast<Mask>(count >= kLanes ? 0xffffu : (1u << count) - 1u); }
  // Lanes that stand for `from` and on, before `to`; the first lane is `at`.
  static Mask between(std::size_t at, std::size_t from, std::size_t to) {
    return static_cast<Mask>(up_to(to > at ? to - at : 0) & ~up_to(from > at ? from - at : 0));
  }
  static Mask above(Float a, Float b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
  static Mask differs(Float a, Float b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ); }
  static Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  static bool any(Mask mask) { return mask != 0; }
  static Float choose(Mask mask, Float a, Float b) { return {_mm512_mask_blend_ps(mask, b.v, a.v)}; }
  static Float where(Mask mask, Float a) { return {_mm512_maskz_mov_ps(mask, a.v)}; }
  static Float load_where(Mask mask, const float* from) { return {_mm512_maskz_loadu_ps(mask, from)}; }
  static Float multiply_add_where(Mask mask, Float a, Float b, Float c) {
    return {_mm512_mask3_fmadd_ps(a.v, b.v, c.v, mask)};
  }

  // y times two to the whole number in the low bits of `whole`.
  static Float times_power(Float y, Float whole) {
    const Int shift = _mm512_slli_epi32(_mm512_castps_si512(whole.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y.v), shift))};
  }

  // Dwords 0, 1, 2, 3 of sixteen rows.
  static void columns(const std::uint8_t* rows, std::size_t stride, Int (&out)[4]) {
    Int x[4];
    for (std::size_t i = 0; i < 4; ++i) x[i] = four_rows(rows + i * stride, 4 * stride);
    transpose(x, out);
  }

  // Dwords 0 to 7 of sixteen rows.
  static void columns(const std::uint8_t* rows, std::size_t stride, Int (&out)[8]) {
    Int low[4], high[4];  // rows 0 to 7, and 8 to 15; of each, dwords k and k + 4
    columns_of_eight(rows, stride, low);
    columns_of_eight(rows + 8 * stride, stride, high);
    for (int k = 0; k < 4; ++k) {
      out[k] = _mm512_shuffle_i32x4(low[k], high[k], 0x88);
      out[k + 4] = _mm512_shuffle_i32x4(low[k], high[k], 0xdd);
    }
  }

  // Byte i of four rows in lane i % 16 of vector i / 16.
  static void across(const std::uint8_t* rows, std::size_t stride, Int (&out)[2]) {
    const Int first = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const Int second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    const Int bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const Int a = two_rows(rows, stride), b = two_rows(rows + 2 * stride, stride);
    out[0] = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(a, first, b), bytes);
    out[1] = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(a, second, b), bytes);
  }

  // Byte i of four rows in lane i.
  static void across(const std::uint8_t* rows, std::size_t stride, Int (&out)[1]) {
    const Int dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const Int bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    out[0] = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(dwords, four_rows(rows, stride)), bytes);
  }

  static Int low_codes(Int v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static Int high_codes(Int v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
  static Int high_codes_in_place(Int v) { return _mm512_and_si512(v, _mm512_set1_epi8(-16)); }
  static Float low_halves(Int v) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(v))}; }
  static Float high_halves(Int v) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)))}; }

  static Int rounded(const float* from, Float inverse) { return _mm512_cvtps_epi32((load(from) * inverse).v); }

 private:
  // 32 bytes of each.
  static Int two_rows(const std::uint8_t* rows, std::size_t stride) {
    const auto row = [&](std::size_t i) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + i * stride));
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(row(0)), row(1), 1);
  }

  // Four lanes: dword k of rows 0 to 3, dword k + 4 of them, then both of rows 4 to 7.
  static void columns_of_eight(const std::uint8_t* rows, std::size_t stride, Int (&out)[4]) {
    Int x[4];
    for (std::size_t i = 0; i < 4; ++i) x[i] = two_rows(rows + i * stride, 4 * stride);
    transpose(x, out);
  }

  // Dwords of four vectors, in each lane.
  static void transpose(const Int (&x)[4], Int (&out)[4]) {
    const Int a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const Int c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
  }

  static Int four_rows(const std::uint8_t* rows, std::size_t stride) {
    const auto row = [&](std::size_t i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * stride));
    };
    const Int two = _mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(1), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(two, row(2), 2), row(3), 3);
  }
};

inline __m512i broadcast_dword(const std::uint8_t* from) { return _mm512_broadcastd_epi32(_mm_loadu_si32(from)); }

}  // namespace
}  // namespace graphrot
