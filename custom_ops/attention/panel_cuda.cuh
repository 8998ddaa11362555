// Attention of a warp's queries over tiles of the cache in shared memory, in fixed point as on the CPU
// (attend_panel.h): queries and weights are whole numbers of up to kLevels for the largest of a row, in two signed
// bytes, so that products with the stored codes are exact and the codes are never widened. That is why the integer form
// of mma is used: a word of 4-bit codes becomes eight operands by three logical instructions, where float16 would need
// twelve.
//
// Queries come in octets. Of A's sixteen rows eight hold the high bytes and eight the low bytes of the same queries, so
// that one mma serves both and a lane finds both sums of a score among its own four: for the few queries of a decode
// step no row is wasted.
//
// Lane l stands for query l / 4 of an octet, and i = l % 4. Slots and channels are in an order of their own, which
// makes every access of shared memory free of conflicts (rows have an odd number of words) and the scores of QK the
// weights of PV in the same lane:
//   QK: column c of product t is slot 4 c + t of 32, so that lane i holds the scores of slots 8 i to 8 i + 7.
//   PV: a word holds four channels of one slot; four words of four slots are transposed to four operands.
#pragma once

#include "common/cuda/device.cuh"
#include "common/cuda/element.cuh"
#include "common/cuda/math.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/shared.cuh"

namespace graphrot::cuda {

constexpr float kLevels = 32639.0f;  // 127 * 256 + 127
constexpr float kLog2E = 1.44269504f;
constexpr float kHiddenMask = -1e30f;  // a mask at or below it hides the slot
constexpr float kLeastPeak = 7.88860905e-31f;  // 2^-100: weights below it count for nothing; its inverse is finite
constexpr float kLargestHalf = 65504.0f;
constexpr unsigned kOctet = 8;
constexpr unsigned kGroupSlots = 32;  // of one step of PV

// 1.5 * 2^23. A whole number within 2^22 added to its bits makes the bits of their sum: conversions in one addition, on
// the wide pipe.
constexpr float kWhole = 12582912.0f;
constexpr int kWholeBits = 0x4b400000;

GRAPHROT_DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// Rows of a tile in shared memory, as words.
struct TileRows {
  Shared<unsigned> words;
  unsigned first;   // of the first row
  unsigned stride;  // of rows
  unsigned codes;   // of a row; step and base follow them

  // Of the lane's first slot.
  GRAPHROT_DEVICE unsigned scales() const { return first + 8 * (threadIdx.x % 4) * stride + codes; }
};

// What a query sees.
struct Sight {
  int first, last;  // slots
  const float* mask;  // by slot; null: none
};

template <int Bits, int Channels, int Octets, int Slots>
struct Panel {
  static_assert(Channels % 64 == 0 && Slots % 32 == 0, "whole products");
  static constexpr unsigned kSteps = Channels / 32;  // of QK
  static constexpr unsigned kGroups = Slots / kGroupSlots;
  static constexpr unsigned kHeld = Slots / 4;        // scores of a query in one lane
  static constexpr unsigned kHalves = Bits == 4 ? 2 : 1;
  static constexpr unsigned kParts = 4 * kHalves;     // products of PV for eight words of a row
  static constexpr unsigned kWordGroups = Channels / (8 * kParts);
  static constexpr bool kSmall = Bits == 4 || Channels <= 128;  // sums of QK are within 2^22

  static constexpr unsigned kQueryWords = Octets * kSteps * kWarp * 4;

  // The fragments of all products, 16 bytes for each lane: read from shared memory, once for four products, since they
  // would take registers all the time.
  Shared<unsigned> queries;
  float unit[Octets];        // of a score, in powers of two; never zero
  float number_sum[Octets];  // of the query's numbers
  float largest[Octets], total[Octets], added[Octets];  // total and added: this lane's share
  float sums[Octets][Channels / 8][2];

  // Fragments of `Octets` octets that follow one another, to shared memory. A lane writes what it reads itself.
  GRAPHROT_DEVICE static void fetch(const uint4* from, Shared<unsigned> to) {
    const unsigned lane = threadIdx.x % kWarp;
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < Octets * kSteps; ++k) {
      to.vector<uint4>((k * kWarp + lane) * 4) = load16(from + k * kWarp + lane);
    }
  }

  // `fetched`: by fetch(), of these octets.
  GRAPHROT_DEVICE void begin(Shared<unsigned> fetched, const float2* units) {
    const unsigned lane = threadIdx.x % kWarp;
    queries = fetched;
    GRAPHROT_UNROLL
    for (unsigned o = 0; o < Octets; ++o) {
      const float2 numbers = units[o * kOctet + lane / 4];
      unit[o] = numbers.x;
      number_sum[o] = numbers.y;
      largest[o] = minus_infinity();
      total[o] = added[o] = 0.0f;
      GRAPHROT_UNROLL
      for (unsigned t = 0; t < Channels / 8; ++t) sums[o][t][0] = sums[o][t][1] = 0.0f;
    }
  }

  template <bool Small>
  GRAPHROT_DEVICE static void clear(int (&sum)[4]) {
    GRAPHROT_UNROLL
    for (unsigned e = 0; e < 4; ++e) sum[e] = Small ? kWholeBits : 0;
  }
  template <bool Small>
  GRAPHROT_DEVICE static float number(int sum) {
    return Small ? __int_as_float(sum) - kWhole : static_cast<float>(sum);
  }

  // Scores before they are scaled: step * product + base * sum of the query's numbers.
  GRAPHROT_DEVICE void multiply_keys(const TileRows& keys, float (&score)[Octets][kHeld]) const {
    const unsigned lane = threadIdx.x % kWarp;
    unsigned at = keys.first + lane / 4 * 4 * keys.stride + lane % 4, scales_at = keys.scales();
    GRAPHROT_UNROLL
    for (unsigned g = 0; g < kGroups; ++g) {
      __syncwarp();  // keeps the compiler from loading ahead over groups, for which there are not enough registers
      int sum[4][Octets][4];
      GRAPHROT_UNROLL
      for (unsigned t = 0; t < 4; ++t) {
        GRAPHROT_UNROLL
        for (unsigned o = 0; o < Octets; ++o) clear<kSmall>(sum[t][o]);
      }
      GRAPHROT_UNROLL
      for (unsigned s = 0; s < kSteps; ++s) {
        unsigned query[Octets][4];
        GRAPHROT_UNROLL
        for (unsigned o = 0; o < Octets; ++o) {
          const uint4 v = queries.vector<uint4>(((o * kSteps + s) * kWarp + lane) * 4);
          query[o][0] = v.x, query[o][1] = v.y, query[o][2] = v.z, query[o][3] = v.w;
        }
        GRAPHROT_UNROLL
        for (unsigned t = 0; t < 4; ++t) {
          const unsigned row = at + t * keys.stride;
          unsigned codes[2];
          if constexpr (Bits == 4) {
            const unsigned word = keys.words[row + 4 * s];
            codes[0] = word & 0x0f0f0f0fu;
            codes[1] = word >> 4 & 0x0f0f0f0fu;
          } else {
            codes[0] = keys.words[row + 8 * s];
            codes[1] = keys.words[row + 8 * s + 4];
          }
          GRAPHROT_UNROLL
          for (unsigned o = 0; o < Octets; ++o) mma_m16n8k32(sum[t][o], query[o], codes);
        }
      }
      at += kGroupSlots * keys.stride;
      GRAPHROT_UNROLL
      for (unsigned o = 0; o < Octets; ++o) {
        GRAPHROT_UNROLL
        for (unsigned k = 0; k < 8; ++k) {
          const int(&both)[4] = sum[k % 4][o];
          score[o][8 * g + k] = fmaf(number<kSmall>(both[k / 4]), 256.0f, number<kSmall>(both[2 + k / 4]));
        }
      }
      GRAPHROT_UNROLL
      for (unsigned j = 0; j < 8; ++j, scales_at += keys.stride) {
        const unsigned scales = keys.words[scales_at];
        const float step = widen_low(scales, Half{}), base = widen_high(scales, Half{});
        GRAPHROT_UNROLL
        for (unsigned o = 0; o < Octets; ++o) {
          float& s = score[o][8 * g + j];
          s = fmaf(step, s, base * number_sum[o]);
        }
      }
      scales_at += (kGroupSlots - 8) * keys.stride;
    }
  }

  // Cap, mask and what is out of sight. `start`: the tile's first slot. `cap`: 0 for none, else by log2(e).
  GRAPHROT_DEVICE void look(const Sight (&sight)[Octets], int start, float cap, bool scaled,
                            float (&score)[Octets][kHeld]) const {
    const int own = start + 8 * static_cast<int>(threadIdx.x % 4);
    GRAPHROT_UNROLL
    for (unsigned o = 0; o < Octets; ++o) {
      GRAPHROT_UNROLL
      for (unsigned k = 0; k < kHeld; ++k) {
        const int slot = own + static_cast<int>(k / 8 * kGroupSlots + k % 8);
        bool seen = slot >= sight[o].first && slot < sight[o].last;
        float s = score[o][k];
        if (scaled) {
          s *= unit[o];
          if (cap > 0.0f) {  // tanh
            const float e = power_of_two(fminf(fmaxf(s, -30.0f), 30.0f));
            s = s != s ? s : cap * __fdividef(e - 1.0f, e + 1.0f);
          }
          if (sight[o].mask != nullptr && seen) {
            const float mask = sight[o].mask[slot];
            seen = mask > kHiddenMask;
            s = fmaf(mask, kLog2E, s);
          }
        }
        score[o][k] = seen ? s : minus_infinity();
      }
    }
  }

  // Scores become weights times the slot's step, as whole numbers of `factor`. What is hidden may be NaN: its weight is
  // zero by itself, its step is kept finite, and its base is left out.
  GRAPHROT_DEVICE void weigh(const TileRows& values, bool scaled, float (&score)[Octets][kHeld],
                             unsigned (&weight)[Octets][kGroups][4], float (&factor)[Octets]) {
    float exponent[Octets], shift[Octets], peak[Octets];
    GRAPHROT_UNROLL
    for (unsigned o = 0; o < Octets; ++o) {
      exponent[o] = exponent_of(o, scaled);
      float most = minus_infinity();
      GRAPHROT_UNROLL
      for (unsigned k = 0; k < kHeld; ++k) most = fmaxf(most, score[o][k]);
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      const float before = largest[o], now = fmaxf(before, most);
      const float by = now == minus_infinity() ? 0.0f : now;  // nothing, or nothing but NaN, was seen
      largest[o] = now;
      shift[o] = -__fmul_rn(by, exponent[o]);
      peak[o] = 0.0f;
      // The largest changes in few tiles but the first ones. Where it does not, `keep` is one to the bit, whatever the
      // other lanes have.
      if (__any_sync(kAllLanes, now != before)) {
        const float gone = __fmul_rn(before, exponent[o]);
        const float keep = before == minus_infinity() ? 0.0f : power_of_two(__fadd_rn(gone, shift[o]));
        total[o] *= keep;
        added[o] *= keep;
        GRAPHROT_UNROLL
        for (unsigned t = 0; t < Channels / 8; ++t) {
          sums[o][t][0] *= keep;
          sums[o][t][1] *= keep;
        }
      }
    }
    unsigned scales_at = values.scales();
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < kHeld; ++k) {
      const unsigned scales = values.words[scales_at];
      scales_at += (k % 8 == 7 ? kGroupSlots - 7 : 1) * values.stride;
      const float step = fminf(fabsf(widen_low(scales, Half{})), kLargestHalf), base = widen_high(scales, Half{});
      GRAPHROT_UNROLL
      for (unsigned o = 0; o < Octets; ++o) {
        const float s = score[o][k], w = power_of_two(fmaf(s, exponent[o], shift[o])), stepped = w * step;
        total[o] += w;
        if (s != minus_infinity()) added[o] = fmaf(w, base, added[o]);
        peak[o] = fmaxf(peak[o], stepped);
        score[o][k] = stepped;
      }
    }
    GRAPHROT_UNROLL
    for (unsigned o = 0; o < Octets; ++o) {
      float most = fmaxf(peak[o], __shfl_xor_sync(kAllLanes, peak[o], 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      const bool counts = most > kLeastPeak;
      const float inverse = counts ? kLevels / most : 0.0f;
      factor[o] = counts ? most / kLevels : 0.0f;
      GRAPHROT_UNROLL
      for (unsigned g = 0; g < kGroups; ++g) {
        GRAPHROT_UNROLL
        for (unsigned half = 0; half < 2; ++half) {
          to_bytes(score[o] + 8 * g + 4 * half, inverse, weight[o][g] + 2 * half);
        }
      }
    }
  }

  // Four numbers from zero up, rounded: their high bytes, then their low ones. 128 more makes the low byte, less 128, a
  // signed one.
  GRAPHROT_DEVICE static void to_bytes(const float* from, float inverse, unsigned* to) {
    unsigned bits[4];
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < 4; ++k) bits[k] = __float_as_uint(fmaf(from[k], inverse, kWhole + 128.0f));
    const unsigned a = __byte_perm(bits[0], bits[1], 0x5140), b = __byte_perm(bits[2], bits[3], 0x5140);
    to[0] = __byte_perm(a, b, 0x7632);
    to[1] = __byte_perm(a, b, 0x5410) ^ 0x80808080u;
  }

  // Byte k of four words in operand k.
  GRAPHROT_DEVICE static void transpose(const unsigned (&x)[4], unsigned (&out)[4]) {
    const unsigned a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
    const unsigned c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    out[0] = __byte_perm(a, b, 0x5410), out[1] = __byte_perm(a, b, 0x7632);
    out[2] = __byte_perm(c, d, 0x5410), out[3] = __byte_perm(c, d, 0x7632);
  }

  // Weighted values on top of the sums. Of 4-bit values the high half of a byte stays where it is, a code times 16, and
  // the factor is divided instead.
  GRAPHROT_DEVICE void multiply_values(const TileRows& values, const unsigned (&weight)[Octets][kGroups][4],
                                       const float (&factor)[Octets]) {
    const unsigned lane = threadIdx.x % kWarp;
    GRAPHROT_UNROLL
    for (unsigned u = 0; u < kWordGroups; ++u) {
      __syncwarp();  // see multiply_keys()
      unsigned at = values.first + 8 * (lane % 4) * values.stride + lane / 4 + 8 * u;
      int sum[Octets][kParts][4];
      GRAPHROT_UNROLL
      for (unsigned o = 0; o < Octets; ++o) {
        GRAPHROT_UNROLL
        for (unsigned p = 0; p < kParts; ++p) clear<true>(sum[o][p]);
      }
      GRAPHROT_UNROLL
      for (unsigned g = 0; g < kGroups; ++g) {
        unsigned words[2][4], codes[2][4];
        GRAPHROT_UNROLL
        for (unsigned j = 0; j < 8; ++j, at += values.stride) words[j / 4][j % 4] = values.words[at];
        at += (kGroupSlots - 8) * values.stride;
        transpose(words[0], codes[0]);
        transpose(words[1], codes[1]);
        GRAPHROT_UNROLL
        for (unsigned p = 0; p < kParts; ++p) {
          unsigned b[2] = {codes[0][p % 4], codes[1][p % 4]};
          if constexpr (Bits == 4) {
            const unsigned mask = p < 4 ? 0x0f0f0f0fu : 0xf0f0f0f0u;
            b[0] &= mask;
            b[1] &= mask;
          }
          GRAPHROT_UNROLL
          for (unsigned o = 0; o < Octets; ++o) mma_m16n8k32(sum[o][p], weight[o][g], b);
        }
      }
      GRAPHROT_UNROLL
      for (unsigned o = 0; o < Octets; ++o) {
        GRAPHROT_UNROLL
        for (unsigned p = 0; p < kParts; ++p) {
          const float low = p < 4 ? factor[o] : 0.0625f * factor[o], high = 256.0f * low;
          GRAPHROT_UNROLL
          for (unsigned e = 0; e < 2; ++e) {
            float& to = sums[o][kParts * u + p][e];
            to = fmaf(number<true>(sum[o][p][e]), high, fmaf(number<true>(sum[o][p][2 + e]), low, to));
          }
        }
      }
    }
  }

  // One tile, of which every query sees All or some.
  GRAPHROT_DEVICE void attend(const TileRows& keys, const TileRows& values, const Sight (&sight)[Octets], int start,
                              float cap, bool scaled) {
    bool all = !scaled, any = false;
    GRAPHROT_UNROLL
    for (unsigned o = 0; o < Octets; ++o) {
      all = all && sight[o].first <= start && sight[o].last >= start + Slots;
      any = any || (sight[o].first < start + Slots && sight[o].last > start);
    }
    if (!__any_sync(kAllLanes, any)) return;
    float score[Octets][kHeld];
    multiply_keys(keys, score);
    unsigned weight[Octets][kGroups][4];
    float factor[Octets];
    if (__any_sync(kAllLanes, !all)) look(sight, start, cap, scaled, score);
    weigh(values, scaled, score, weight, factor);
    multiply_values(values, weight, factor);
  }

  // The lanes' shares together.
  GRAPHROT_DEVICE void end() {
    GRAPHROT_UNROLL
    for (unsigned o = 0; o < Octets; ++o) {
      GRAPHROT_UNROLL
      for (unsigned lanes = 1; lanes < 4; lanes *= 2) {
        total[o] += __shfl_xor_sync(kAllLanes, total[o], lanes);
        added[o] += __shfl_xor_sync(kAllLanes, added[o], lanes);
      }
    }
  }

  // What a score is multiplied by to be an exponent of two. `scaled`: it is one already.
  GRAPHROT_DEVICE float exponent_of(unsigned o, bool scaled) const { return scaled ? 1.0f : unit[o]; }

  // The largest score as an exponent of two.
  GRAPHROT_DEVICE float top(unsigned o, bool scaled) const {
    return largest[o] == minus_infinity() ? largest[o] : __fmul_rn(largest[o], exponent_of(o, scaled));
  }

  // Sums of eight channels that follow one another, those of place 8 * (4 * part + i) of the padded channels.
  static constexpr unsigned kChannelParts = kWordGroups * kHalves;
  GRAPHROT_DEVICE void channels(unsigned o, unsigned part, float (&x)[8]) const {
    GRAPHROT_UNROLL
    for (unsigned k = 0; k < 8; ++k) x[k] = sums[o][4 * part + k % 4][k / 4] + added[o];
  }
};

}  // namespace graphrot::cuda
