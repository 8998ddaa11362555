// AVX-512 with VNNI. This file alone is compiled for it; the rules of hadamard/avx2.cc hold here too.
#include "common/isa.h"

#if GRAPHROT_X86

#include <cstring>

#include "matmul/product_avx512.h"

namespace graphrot {
namespace {

using blocks::Part;

constexpr std::size_t kAhead = 1024;  // bytes that packed weights are fetched ahead of their use
constexpr std::size_t kAheadTogether = 2048;  // the same, where tiles are read side by side

inline __m512i load(const std::uint8_t* from) { return _mm512_loadu_si512(from); }

inline __m512i four_codes(const std::int8_t* from) {
  int codes;
  std::memcpy(&codes, from, sizeof codes);
  return _mm512_set1_epi32(codes);
}

// Codes of 4 bits straight from the packed layout. For a row or two, products with high halves are summed as they
// are, sixteen times too large, in registers of their own: that saves the shifts.
template <int Rows>
inline void add_halves(const std::uint8_t* unit, std::size_t units, const std::int8_t* codes, std::size_t stride,
                       __m512i (&sum)[Rows][kVectors]) {
  constexpr bool kApart = Rows <= 2;
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(static_cast<char>(0xf0));
  __m512i upper[kApart ? Rows : 1][kVectors];
  if constexpr (kApart) {
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVectors; ++v) upper[r][v] = _mm512_setzero_si512();
    }
  }
  for (; units > 0; --units, unit += kUnitBytes, codes += 8) {
    __m512i first[kVectors], second[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const __m512i both = load(unit + 64 * v);
      _mm_prefetch(reinterpret_cast<const char*>(unit + kAhead + 64 * v), _MM_HINT_T0);
      first[v] = _mm512_and_si512(both, low);
      second[v] = kApart ? _mm512_and_si512(both, high) : _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
    for (int r = 0; r < Rows; ++r) {
      const std::int8_t* row = codes + static_cast<std::size_t>(r) * stride;
      const __m512i a = four_codes(row), b = four_codes(row + 4);
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], first[v], a);
        __m512i& to = kApart ? upper[kApart ? r : 0][v] : sum[r][v];
        to = _mm512_dpbusd_epi32(to, second[v], b);
      }
    }
  }
  if constexpr (kApart) {
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_add_epi32(sum[r][v], _mm512_srai_epi32(upper[r][v], 4));
    }
  }
}

// Whole bytes: `steps` of four channels.
template <int Rows, bool Fetch>
inline void add_bytes(const std::uint8_t* from, std::size_t steps, const std::int8_t* codes, std::size_t stride,
                      __m512i (&sum)[Rows][kVectors]) {
  for (; steps > 0; --steps, from += kUnitBytes, codes += 4) {
    __m512i weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = load(from + 64 * v);
      if constexpr (Fetch) _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + 64 * v), _MM_HINT_T0);
    }
    for (int r = 0; r < Rows; ++r) {
      const __m512i a = four_codes(codes + static_cast<std::size_t>(r) * stride);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], weights[v], a);
    }
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

// Sums of the part's groups to totals; `add(k, eights, sum)` adds the products with channels from k on.
template <int Rows, bool Fetch, class Add>
inline void for_groups(const Part& part, const Add& add) {
  const ProductProblem& problem = *part.problem;
  std::size_t g = part.begin / problem.group, group_begin = g * problem.group;
  for (std::size_t k = part.begin; k < part.end; ++g) {
    const std::size_t group_end = group_begin + problem.group, next = group_end < part.end ? group_end : part.end;
    __m512i sum[Rows][kVectors];
    if (k == group_begin) {
      if constexpr (Fetch) fetch_scales(problem, part.tile, g + 1);
      start_group<Rows>(problem, part.tile, g, part.sums, sum);
    } else {
      load_sums<Rows>(part.partial, sum);
    }
    add(k, (next - k + 7) / 8, sum);
    if (next == group_end || next == problem.channels) {
      scale_group<Rows>(problem, part.tile, g, sum, part.totals);
    } else {
      store_sums<Rows>(sum, part.partial);
    }
    group_begin = k = next;
  }
}

struct Vnni {
  static constexpr std::size_t kSums = 6;  // of 64 columns, which fit into registers: tiles times rows
  static constexpr std::size_t kDirect = 6;
  static constexpr std::size_t kRows = 6;
  static constexpr std::size_t kChannels = 2048;
  static constexpr std::size_t kPanelBytes = kChannels * kTileColumns;

  template <int Rows>
  static void direct(const Part& part) {
    const ProductProblem& problem = *part.problem;
    const std::uint8_t* unit = unit_of(problem, part.tile, part.begin);
    for_groups<Rows, true>(part, [&](std::size_t k, std::size_t eights, __m512i(&sum)[Rows][kVectors]) {
      if (problem.bits == 4) {
        add_halves<Rows>(unit, eights, part.codes + k, part.stride, sum);
        unit += eights * kUnitBytes;
      } else {
        add_bytes<Rows, true>(unit, 2 * eights, part.codes + k, part.stride, sum);
        unit += 2 * eights * kUnitBytes;
      }
    });
  }

  // Few rows and several tiles, whose weights are read side by side: the processor fetches ahead within a page only,
  // and one stream does not keep the memory busy. Totals of a tile are apart by those of all rows.
  template <int Rows, int Tiles>
  static void together(const Part& part) {
    constexpr std::size_t kTotals = Rows * kTileColumns;
    const ProductProblem& problem = *part.problem;
    const std::size_t apart = problem.units * kUnitBytes;
    const std::uint8_t* unit = unit_of(problem, part.tile, 0);
    const __m512i low = _mm512_set1_epi8(15);
    for (std::size_t g = 0, k = 0; g < problem.groups; ++g, k += problem.group) {
      const std::size_t left = problem.channels - k, eights = ((left < problem.group ? left : problem.group) + 7) / 8;
      __m512i sum[Tiles][Rows][kVectors];
      for (std::size_t t = 0; t < Tiles; ++t) {
        fetch_scales(problem, part.tile + t, g + 1);
        start_group<Rows>(problem, part.tile + t, g, part.sums, sum[t]);
      }
      const std::int8_t* codes = part.codes + k;
      const std::size_t steps = problem.bits == 4 ? eights : 2 * eights, channels = problem.bits == 4 ? 8 : 4;
      for (std::size_t step = 0; step < steps; ++step, unit += kUnitBytes, codes += channels) {
        __m512i a[Rows], b[Rows];
        for (int r = 0; r < Rows; ++r) {
          a[r] = four_codes(codes + static_cast<std::size_t>(r) * part.stride);
          b[r] = four_codes(codes + static_cast<std::size_t>(r) * part.stride + channels - 4);
        }
        for (std::size_t t = 0; t < Tiles; ++t) {
          for (int v = 0; v < kVectors; ++v) {
            const std::uint8_t* from = unit + t * apart + 64 * v;
            _mm_prefetch(reinterpret_cast<const char*>(from + kAheadTogether), _MM_HINT_T0);
            const __m512i both = load(from);
            if (problem.bits == 4) {
              const __m512i first = _mm512_and_si512(both, low);
              const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
              for (int r = 0; r < Rows; ++r) {
                sum[t][r][v] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[t][r][v], first, a[r]), second, b[r]);
              }
            } else {
              for (int r = 0; r < Rows; ++r) sum[t][r][v] = _mm512_dpbusd_epi32(sum[t][r][v], both, a[r]);
            }
          }
        }
      }
      for (std::size_t t = 0; t < Tiles; ++t) {
        scale_group<Rows>(problem, part.tile + t, g, sum[t], part.totals + t * kTotals);
      }
    }
  }

  // Codes of 8 bits are packed as they are multiplied.
  static const std::uint8_t* unpack(const ProductProblem& problem, std::size_t tile, std::size_t begin, std::size_t end,
                                    std::uint8_t* panel) {
    const std::uint8_t* unit = unit_of(problem, tile, begin);
    if (problem.bits == 8) return unit;
    const __m512i low = _mm512_set1_epi8(15);
    std::uint8_t* to = panel;
    for (std::size_t eights = (end - begin + 7) / 8; eights > 0; --eights, unit += kUnitBytes, to += 2 * kUnitBytes) {
      for (int v = 0; v < kVectors; ++v) {
        const __m512i both = load(unit + 64 * v);
        _mm512_storeu_si512(to + 64 * v, _mm512_and_si512(both, low));
        _mm512_storeu_si512(to + kUnitBytes + 64 * v, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
      }
    }
    return panel;
  }

  template <int Rows>
  static void panel(const Part& part) {
    const std::uint8_t* from = part.panel;
    for_groups<Rows, false>(part, [&](std::size_t k, std::size_t eights, __m512i(&sum)[Rows][kVectors]) {
      add_bytes<Rows, false>(from, 2 * eights, part.codes + k, part.stride, sum);
      from += 2 * eights * kUnitBytes;
    });
  }

  template <class T>
  static void finish(const ProductProblem& problem, std::size_t tile, float scale, const float* totals, T* out) {
    finish_row(problem, tile, scale, totals, out);
  }
};

constexpr ProductKernels kKernels = blocks::kernels<Vnni>();

}  // namespace

const ProductKernels& product_vnni() { return kKernels; }

}  // namespace graphrot

#endif
