// AVX2 with FMA and F16C. This file alone is compiled for them; the rules of hadamard/avx2.cc hold here too.
// Codes of at most 4 bits times int8 are summed in pairs, and pairs over eight steps of four channels, within 16 bits:
// 8 * 2 * 15 * 127 = 30480. Weights of 8 bits are two such planes, the upper one sixteen times as heavy.
#include "common/isa.h"

#if GRAPHROT_X86

#include <immintrin.h>

#include <cstring>

#include "hadamard/vector_avx2.h"
#include "matmul/product_blocks.h"

namespace graphrot {
namespace {

using blocks::Part;

constexpr int kVectors = 4;               // of eight columns: half a tile, as many as there are registers for
constexpr std::size_t kHalf = 32;         // columns
constexpr std::size_t kHalfBytes = 128;   // of four channels of them
constexpr std::size_t kSteps = 8;         // whose pairs of products fit into 16 bits
constexpr std::size_t kAhead = 1024;      // bytes that packed weights are fetched ahead of their use

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline void store(void* to, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(to), v); }

inline __m256i four_codes(const std::int8_t* from) {
  int codes;
  std::memcpy(&codes, from, sizeof codes);
  return _mm256_set1_epi32(codes);
}

template <int Rows>
inline void clear(__m256i (&pairs)[Rows][kVectors]) {
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) pairs[r][v] = _mm256_setzero_si256();
  }
}

// Products with four channels of each row, summed in pairs.
template <int Rows>
inline void add_pairs(const __m256i (&weights)[kVectors], const std::int8_t* codes, std::size_t stride,
                      __m256i (&pairs)[Rows][kVectors]) {
  for (int r = 0; r < Rows; ++r) {
    const __m256i a = four_codes(codes + static_cast<std::size_t>(r) * stride);
    for (int v = 0; v < kVectors; ++v) {
      pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(weights[v], a));
    }
  }
}

// sums [Rows][64] += weight * pairs
template <int Rows>
inline void widen(const __m256i (&pairs)[Rows][kVectors], short weight, std::int32_t* sums) {
  const __m256i by = _mm256_set1_epi16(weight);
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      std::int32_t* to = sums + static_cast<std::size_t>(r) * kTileColumns + 8 * v;
      store(to, _mm256_add_epi32(load(to), _mm256_madd_epi16(pairs[r][v], by)));
    }
  }
}

// Up to 32 channels of half a tile, straight from the packed layout. Codes of 4 bits: both halves of `units` bytes.
template <int Rows>
inline void add_halves(const std::uint8_t* unit, std::size_t units, const std::int8_t* codes, std::size_t stride,
                       std::int32_t* sums) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i pairs[Rows][kVectors];
  clear<Rows>(pairs);
  for (; units > 0; --units, unit += kUnitBytes, codes += 8) {
    __m256i first[kVectors], second[kVectors];
    _mm_prefetch(reinterpret_cast<const char*>(unit + kAhead), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(unit + kAhead + 64), _MM_HINT_T0);
    for (int v = 0; v < kVectors; ++v) {
      const __m256i both = load(unit + 32 * v);
      first[v] = _mm256_and_si256(both, low);
      second[v] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    add_pairs<Rows>(first, codes, stride, pairs);
    add_pairs<Rows>(second, codes + 4, stride, pairs);
  }
  widen<Rows>(pairs, 1, sums);
}

// Codes of 8 bits: the lower or the upper plane of `steps` times four channels.
template <int Rows, bool Upper>
inline void add_plane(const std::uint8_t* unit, std::size_t steps, const std::int8_t* codes, std::size_t stride,
                      std::int32_t* sums) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i pairs[Rows][kVectors];
  clear<Rows>(pairs);
  for (; steps > 0; --steps, unit += kUnitBytes, codes += 4) {
    __m256i weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const __m256i both = load(unit + 32 * v);
      weights[v] = _mm256_and_si256(Upper ? _mm256_srli_epi16(both, 4) : both, low);
    }
    if constexpr (!Upper) {
      _mm_prefetch(reinterpret_cast<const char*>(unit + kAhead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(unit + kAhead + 64), _MM_HINT_T0);
    }
    add_pairs<Rows>(weights, codes, stride, pairs);
  }
  widen<Rows>(pairs, Upper ? 16 : 1, sums);
}

// The same from a panel, where a plane of half a tile is contiguous.
template <int Rows>
inline void add_bytes(const std::uint8_t* from, std::size_t steps, const std::int8_t* codes, std::size_t stride,
                      short weight, std::int32_t* sums) {
  __m256i pairs[Rows][kVectors];
  clear<Rows>(pairs);
  for (; steps > 0; --steps, from += kHalfBytes, codes += 4) {
    __m256i weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = load(from + 32 * v);
    add_pairs<Rows>(weights, codes, stride, pairs);
  }
  widen<Rows>(pairs, weight, sums);
}

// -zero * (sum of the row's codes in the group), to which the products are added.
template <int Rows>
inline void start_group(const ProductProblem& problem, std::size_t tile, std::size_t group,
                        const std::int32_t* row_sums, std::int32_t* sums) {
  const std::size_t start = (tile * problem.groups + group) * kTileColumns;
  for (std::size_t c = 0; c < kTileColumns; c += 8) {
    __m256i zero = _mm256_set1_epi32(-problem.zero);
    if (problem.zeros != nullptr) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(problem.zeros + start + c));
      zero = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtepu8_epi32(bytes));
    }
    for (std::size_t r = 0; r < Rows; ++r) {
      const __m256i all = _mm256_set1_epi32(row_sums[r * problem.groups + group]);
      store(sums + r * kTileColumns + c, _mm256_mullo_epi32(zero, all));
    }
  }
}

// totals = scales * sums, plus the totals of the groups before.
template <int Rows>
inline void scale_group(const ProductProblem& problem, std::size_t tile, std::size_t group, const std::int32_t* sums,
                        float* totals) {
  const float* scales = problem.scales + (tile * problem.groups + group) * kTileColumns;
  for (std::size_t c = 0; c < kTileColumns; c += 8) {
    const __m256 scale = _mm256_loadu_ps(scales + c);
    for (std::size_t r = 0; r < Rows; ++r) {
      float* to = totals + r * kTileColumns + c;
      const __m256 before = group == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(to);
      _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(load(sums + r * kTileColumns + c)), scale, before));
    }
  }
}

// Sums of a group that goes on in the next block of channels are kept.
template <int Rows>
inline void copy(const void* from, void* to) {
  for (std::size_t i = 0; i < Rows * kTileColumns * sizeof(float); i += 32) {
    store(static_cast<char*>(to) + i, load(static_cast<const char*>(from) + i));
  }
}

inline const std::uint8_t* unit_of(const ProductProblem& problem, std::size_t tile, std::size_t channel) {
  return problem.codes + (tile * problem.units + channel / (problem.bits == 4 ? 8 : 4)) * kUnitBytes;
}

// Those of the next group, which lie apart from the codes.
inline void fetch_scales(const ProductProblem& problem, std::size_t tile, std::size_t group) {
  const auto* scales = reinterpret_cast<const char*>(problem.scales + (tile * problem.groups + group) * kTileColumns);
  for (int line = 0; line < 4; ++line) _mm_prefetch(scales + 64 * line, _MM_HINT_T0);
}

// Sums of the part's groups to totals; `add(k, eights, sums)` adds the products with up to 32 channels from k on.
template <int Rows, bool Fetch, class Add>
inline void for_groups(const Part& part, const Add& add) {
  const ProductProblem& problem = *part.problem;
  alignas(32) std::int32_t sums[Rows * kTileColumns];
  std::size_t g = part.begin / problem.group, group_begin = g * problem.group;
  for (std::size_t k = part.begin; k < part.end; ++g) {
    const std::size_t group_end = group_begin + problem.group, next = group_end < part.end ? group_end : part.end;
    if (k == group_begin) {
      if constexpr (Fetch) fetch_scales(problem, part.tile, g + 1);
      start_group<Rows>(problem, part.tile, g, part.sums, sums);
    } else {
      copy<Rows>(part.partial, sums);
    }
    for (; k < next; k += 4 * kSteps) add(k, next - k < 4 * kSteps ? (next - k + 7) / 8 : kSteps / 2, sums);
    if (next == group_end || next == problem.channels) {
      scale_group<Rows>(problem, part.tile, g, sums, part.totals);
    } else {
      copy<Rows>(sums, part.partial);
    }
    group_begin = k = next;
  }
}

struct Avx2Product {
  static constexpr std::size_t kSums = 1;  // sixteen registers do not hold those of two tiles
  static constexpr std::size_t kDirect = 2;
  static constexpr std::size_t kRows = 2;
  static constexpr std::size_t kChannels = 512;
  static constexpr std::size_t kPanelBytes = 2 * kChannels * kTileColumns;  // two planes

  template <int Rows>
  static void direct(const Part& part) {
    const ProductProblem& problem = *part.problem;
    const std::size_t units = problem.bits == 4 ? kSteps / 2 : kSteps;  // of 32 channels
    const std::uint8_t* unit = unit_of(problem, part.tile, part.begin);
    for_groups<Rows, true>(part, [&](std::size_t k, std::size_t eights, std::int32_t* sums) {
      for (std::size_t half = 0; half < 2; ++half) {
        const std::uint8_t* from = unit + half * kHalfBytes;
        std::int32_t* to = sums + half * kHalf;
        if (problem.bits == 4) {
          add_halves<Rows>(from, eights, part.codes + k, part.stride, to);
        } else {
          add_plane<Rows, false>(from, 2 * eights, part.codes + k, part.stride, to);
          add_plane<Rows, true>(from, 2 * eights, part.codes + k, part.stride, to);
        }
      }
      unit += units * kUnitBytes;
    });
  }

  // [32 channels][half of the tile][plane][steps][128 bytes]; the last channels may take fewer steps.
  static const std::uint8_t* unpack(const ProductProblem& problem, std::size_t tile, std::size_t begin, std::size_t end,
                                    std::uint8_t* panel) {
    const std::uint8_t* unit = unit_of(problem, tile, begin);
    const __m256i low = _mm256_set1_epi8(15);
    std::uint8_t* to = panel;
    for (std::size_t k = begin; k < end; k += 4 * kSteps) {
      const std::size_t eights = end - k < 4 * kSteps ? (end - k + 7) / 8 : kSteps / 2;
      const std::size_t units = problem.bits == 4 ? eights : 2 * eights, plane = 2 * eights * kHalfBytes;
      const std::size_t step = problem.bits == 4 ? 2 * kHalfBytes : kHalfBytes;   // from one unit to the next
      const std::size_t upper = problem.bits == 4 ? kHalfBytes : plane;           // from lower to upper halves
      for (std::size_t half = 0; half < 2; ++half) {
        for (std::size_t u = 0; u < units; ++u) {
          for (std::size_t i = 0; i < kHalfBytes; i += 32) {
            const __m256i both = load(unit + u * kUnitBytes + half * kHalfBytes + i);
            store(to + u * step + i, _mm256_and_si256(both, low));
            store(to + u * step + upper + i, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
          }
        }
        to += problem.bits == 4 ? plane : 2 * plane;
      }
      unit += units * kUnitBytes;
    }
    return panel;
  }

  template <int Rows>
  static void panel(const Part& part) {
    const short last = part.problem->bits == 4 ? 1 : 16;
    const std::uint8_t* from = part.panel;
    for_groups<Rows, false>(part, [&](std::size_t k, std::size_t eights, std::int32_t* sums) {
      for (std::size_t half = 0; half < 2; ++half) {
        for (short weight = 1; weight <= last; weight = static_cast<short>(weight * 16)) {
          add_bytes<Rows>(from, 2 * eights, part.codes + k, part.stride, weight, sums + half * kHalf);
          from += 2 * eights * kHalfBytes;
        }
      }
    });
  }

  template <class T>
  static void finish(const ProductProblem& problem, std::size_t tile, float scale, const float* totals, T* out) {
    const __m256 by = _mm256_set1_ps(scale);
    const std::size_t start = tile * kTileColumns;
    for (std::size_t column = start; column < start + kTileColumns && column < problem.columns; column += 8) {
      const __m256 bias = problem.bias != nullptr ? _mm256_loadu_ps(problem.bias + column) : _mm256_setzero_ps();
      const __m256 result = _mm256_fmadd_ps(_mm256_loadu_ps(totals + (column - start)), by, bias);
      const std::size_t left = problem.columns - column;
      if (left >= 8) {
        Avx2{result}.store(out + column);
        continue;
      }
      T eight[8];
      Avx2{result}.store(eight);
      for (std::size_t i = 0; i < left; ++i) out[column + i] = eight[i];
    }
  }
};

constexpr ProductKernels kKernels = blocks::kernels<Avx2Product>();

}  // namespace

const ProductKernels& product_avx2() { return kKernels; }

}  // namespace graphrot

#endif
