// AVX2 with FMA and F16C. This file alone is compiled for them; the rules of hadamard/avx2.cc hold here too.
#include "attention/cache.h"

#if GRAPHROT_X86

#include "hadamard/vector_avx2.h"

namespace graphrot {
namespace {

constexpr std::size_t kLanes = 8;

template <class T>
void load(const void* from, float* to, std::size_t count) {
  const T* elements = static_cast<const T*>(from);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Avx2::load(elements + i).store(to + i);
  for (; i < count; ++i) to[i] = Avx2::one(elements[i]);
}

template <class T>
void save(const float* from, void* to, std::size_t count) {
  T* elements = static_cast<T*>(to);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Avx2::load(from + i).store(elements + i);
  for (; i < count; ++i) Avx2::put(from[i], elements + i);
}

constexpr unsigned kNan = 0x7e00u, kLargest = 0x7bffu, kSign = 0x8000u, kInfinity = 0x7c00u,
                   kInfinityBits = 0x7f800000u;

unsigned saturated(float value) {
  Half half;
  Avx2::put(value, &half);
  return (half.bits & ~kSign) == kInfinity ? (half.bits & kSign) | kLargest : half.bits;
}

void put(std::uint8_t* to, unsigned step, unsigned base) {
  _mm_storeu_si32(to, _mm_cvtsi32_si128(static_cast<int>(step | base << 16)));
}

void clear(std::uint8_t* row, std::size_t codes) {
  for (std::size_t i = 0; i < codes; ++i) row[i] = 0;
}

float reduced(__m256 v, bool largest) {
  const auto two = [largest](__m128 a, __m128 b) { return largest ? _mm_max_ps(a, b) : _mm_min_ps(a, b); };
  __m128 four = two(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = two(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(two(four, _mm_shuffle_ps(four, four, 1)));
}

struct Rounding {
  __m256 base, step, levels;

  // Clipped first, which keeps it in the range of an int.
  __m256i operator()(const float* z) const {
    const __m256 quotient = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(z), base), step);
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(quotient, _mm256_setzero_ps()), levels));
  }
};

void put_bytes(std::uint8_t* to, __m256i codes) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}

// Eight bytes at a time. The last eight may overlap the ones before, which are then written twice.
void store(const CacheFormat& format, const float* z, std::uint8_t* row) {
  const std::size_t size = format.head_size, codes = format.bits == 4 ? size / 2 : size;
  if (codes < kLanes) return cache_scalar().store(format, z, row);
  Avx2::Peak peak;
  __m256 low = _mm256_loadu_ps(z), high = low;
  for (std::size_t i = 0; i < size; i += kLanes) {
    const std::size_t at = i + kLanes <= size ? i : size - kLanes;
    const __m256 v = _mm256_loadu_ps(z + at);
    low = _mm256_min_ps(low, v);
    high = _mm256_max_ps(high, v);
    peak.add({v});
  }
  if (peak.largest() >= kInfinityBits) {
    clear(row, codes);
    return put(row + codes, 0, kNan);
  }
  const float levels = format.bits == 4 ? 15.0f : 255.0f, least = reduced(low, false) + 0.0f;  // no negative zeros
  const unsigned step_bits = saturated((reduced(high, true) - least + 0.0f) / levels), base_bits = saturated(least);
  put(row + codes, step_bits, base_bits);
  if (step_bits == 0) return clear(row, codes);
  const float step = Avx2::one(Half{static_cast<std::uint16_t>(step_bits)});
  const float base = Avx2::one(Half{static_cast<std::uint16_t>(base_bits)});
  const Rounding rounding{_mm256_set1_ps(base), _mm256_set1_ps(step), _mm256_set1_ps(levels)};
  for (std::size_t i = 0; i < codes; i += kLanes) {
    const std::size_t at = i + kLanes <= codes ? i : codes - kLanes;
    __m256i bytes = rounding(z + at);
    if (format.bits == 4) bytes = _mm256_or_si256(bytes, _mm256_slli_epi32(rounding(z + at + codes), 4));
    put_bytes(row + at, bytes);
  }
}

constexpr CacheKernels kKernels = {{&load<float>, &load<Half>, &load<BFloat16>},
                                   {&save<float>, &save<Half>, &save<BFloat16>},
                                   &store};

}  // namespace

const CacheKernels& cache_avx2() { return kKernels; }

}  // namespace graphrot

#endif
