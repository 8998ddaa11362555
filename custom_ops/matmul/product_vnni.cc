// AVX-512 with VNNI. This file alone is compiled for it; the rules of hadamard/avx2.cc hold here too.
#include "common/isa.h"

#if GRAPHROT_X86

#include <cstring>

#include "matmul/product_avx512.h"

namespace graphrot {
namespace {

using blocks::Part;

constexpr std::size_t kAhead = 4096;  // bytes that packed weights are fetched ahead of their use

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

struct Vnni {
  static constexpr std::size_t kDirect = 6;
  static constexpr std::size_t kRows = 6;
  static constexpr std::size_t kChannels = 2048;
  static constexpr std::size_t kPanelBytes = kChannels * kTileColumns;

  template <int Rows>
  static void direct(const Part& part) {
    const ProductProblem& problem = *part.problem;
    const std::uint8_t* unit = problem.codes + part.tile * problem.units * kUnitBytes;
    for (std::size_t g = 0, k = 0; g < problem.groups; ++g, k += problem.group) {
      const std::size_t left = problem.channels - k, eights = ((left < problem.group ? left : problem.group) + 7) / 8;
      __m512i sum[Rows][kVectors];
      start_group<Rows>(problem, part.tile, g, part.sums, sum);
      if (problem.bits == 4) {
        add_halves<Rows>(unit, eights, part.codes + k, part.stride, sum);
        unit += eights * kUnitBytes;
      } else {
        add_bytes<Rows, true>(unit, 2 * eights, part.codes + k, part.stride, sum);
        unit += 2 * eights * kUnitBytes;
      }
      scale_group<Rows>(problem, part.tile, g, sum, part.totals);
    }
  }

  // Codes of 8 bits are packed as they are multiplied.
  static const std::uint8_t* unpack(const ProductProblem& problem, std::size_t tile, std::size_t begin, std::size_t end,
                                    std::uint8_t* panel) {
    const std::uint8_t* unit = problem.codes + tile * problem.units * kUnitBytes;
    if (problem.bits == 8) return unit + begin / 4 * kUnitBytes;
    unit += begin / 8 * kUnitBytes;
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
    const ProductProblem& problem = *part.problem;
    const std::uint8_t* from = part.panel;
    std::size_t g = part.begin / problem.group, group_begin = g * problem.group;
    for (std::size_t k = part.begin; k < part.end; ++g) {
      const std::size_t group_end = group_begin + problem.group, next = group_end < part.end ? group_end : part.end;
      const std::size_t steps = (next - k + 7) / 8 * 2;
      __m512i sum[Rows][kVectors];
      if (k == group_begin) {
        start_group<Rows>(problem, part.tile, g, part.sums, sum);
      } else {
        load_sums<Rows>(part.totals, sum);
      }
      add_bytes<Rows, false>(from, steps, part.codes + k, part.stride, sum);
      from += steps * kUnitBytes;
      if (next == group_end || next == problem.channels) {
        scale_group<Rows>(problem, part.tile, g, sum, part.totals);
      } else {
        store_sums<Rows>(sum, part.totals);
      }
      group_begin = k = next;
    }
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
