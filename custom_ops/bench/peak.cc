#include "bench/peak.h"

#include <cstdint>

#if GRAPHROT_X86 && defined(__GNUC__)
#include <immintrin.h>
#define GRAPHROT_PEAK 1
#else
#define GRAPHROT_PEAK 0
#endif

namespace graphrot {
namespace {

#if GRAPHROT_PEAK

// Twelve sums that do not wait for each other, all of it in assembly: nothing is taken out, moved or spilled.
constexpr int kSums = 12;

#define GRAPHROT_TWELVE(one) \
  one("0") one("1") one("2") one("3") one("4") one("5") one("6") one("7") one("8") one("9") one("10") one("11")

__attribute__((target("avx2"))) double avx2(std::size_t rounds) {
#define GRAPHROT_ONE(sum)                           \
  "vpmaddubsw %%ymm12, %%ymm13, %%ymm15\n\t"        \
  "vpmaddwd %%ymm14, %%ymm15, %%ymm15\n\t"          \
  "vpaddd %%ymm15, %%ymm" sum ", %%ymm" sum "\n\t"
  for (std::size_t round = 0; round < rounds; ++round) {
    __asm__ volatile(GRAPHROT_TWELVE(GRAPHROT_ONE)
                     :
                     :
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                       "xmm15");
  }
#undef GRAPHROT_ONE
  return static_cast<double>(rounds) * kSums * 32;
}

__attribute__((target("avx512f,avx512vnni"))) double vnni(std::size_t rounds) {
#define GRAPHROT_ONE(sum) "vpdpbusd %%zmm13, %%zmm12, %%zmm" sum "\n\t"
  for (std::size_t round = 0; round < rounds; ++round) {
    __asm__ volatile(GRAPHROT_TWELVE(GRAPHROT_ONE)
                     :
                     :
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11");
  }
#undef GRAPHROT_ONE
  return static_cast<double>(rounds) * kSums * 64;
}

struct alignas(64) TileConfig {
  std::uint8_t palette, start, reserved[14];
  std::uint16_t bytes[16];
  std::uint8_t rows[16];
};

// Four products of tiles of 16 rows by 64 bytes.
__attribute__((target("amx-tile,amx-int8"))) double amx(std::size_t rounds) {
  TileConfig config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  __asm__ volatile("" : : "m"(config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (std::size_t round = 0; round < rounds; ++round) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return static_cast<double>(rounds) * 4 * 16 * 16 * 64;
}

#endif

}  // namespace

double multiply_adds(Isa isa, std::size_t rounds) {
#if GRAPHROT_PEAK
  switch (isa) {
    case Isa::kAvx2:
    case Isa::kAvx512: return avx2(rounds);  // the products of bytes are those of AVX2
    case Isa::kVnni: return vnni(rounds);
    case Isa::kAmx: return amx(rounds);
    case Isa::kScalar: break;
  }
#endif
  (void)isa;
  (void)rounds;
  return 0;
}

}  // namespace graphrot
