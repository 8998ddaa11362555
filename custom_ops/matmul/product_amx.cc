// AMX. This file alone is compiled for it; the rules of hadamard/avx2.cc hold here too.
#include "common/isa.h"

#if GRAPHROT_X86

#include "matmul/product_amx.h"

namespace graphrot {
namespace {

// Compilers do not know that tiles are loaded from memory: what was stored must be there.
inline void stores_are_done() {
#if !defined(_MSC_VER)
  __asm__ volatile("" : : : "memory");
#endif
}

struct AmxTiles {
  static void configure(std::size_t step) {
    struct {
      std::uint8_t palette, start_row, reserved[14];
      std::uint16_t row_bytes[16];
      std::uint8_t rows[16];
    } config = {};
    static_assert(sizeof config == 64, "the layout that the instruction reads");
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = static_cast<std::uint16_t>(i == 4 || i == 5 ? step : 64);
      config.rows[i] = static_cast<std::uint8_t>(i < 6 ? kTileRows : step / 4);
    }
    stores_are_done();
    _tile_loadconfig(&config);
  }

  static void release() { _tile_release(); }

  // The intrinsics want the number of a tile in digits.
  template <int Tile>
  static void zero() {
    if constexpr (Tile == 0) _tile_zero(0);
    if constexpr (Tile == 1) _tile_zero(1);
    if constexpr (Tile == 2) _tile_zero(2);
    if constexpr (Tile == 3) _tile_zero(3);
  }

  template <int Tile>
  static void load(const void* from, std::size_t row_bytes) {
    stores_are_done();
    if constexpr (Tile == 0) _tile_loadd(0, from, row_bytes);
    if constexpr (Tile == 1) _tile_loadd(1, from, row_bytes);
    if constexpr (Tile == 2) _tile_loadd(2, from, row_bytes);
    if constexpr (Tile == 3) _tile_loadd(3, from, row_bytes);
    if constexpr (Tile == 4) _tile_loadd(4, from, row_bytes);
    if constexpr (Tile == 5) _tile_loadd(5, from, row_bytes);
    if constexpr (Tile == 6) _tile_loadd(6, from, row_bytes);
    if constexpr (Tile == 7) _tile_loadd(7, from, row_bytes);
  }

  template <int Tile>
  static void store(void* to, std::size_t row_bytes) {
    if constexpr (Tile == 0) _tile_stored(0, to, row_bytes);
    if constexpr (Tile == 1) _tile_stored(1, to, row_bytes);
    if constexpr (Tile == 2) _tile_stored(2, to, row_bytes);
    if constexpr (Tile == 3) _tile_stored(3, to, row_bytes);
    stores_are_done();
  }

  // Signed activations by unsigned weights.
  template <int Sum, int Rows, int Weights>
  static void add_product() {
    if constexpr (Sum == 0 && Weights == 6) _tile_dpbsud(0, 4, 6);
    if constexpr (Sum == 1 && Weights == 7) _tile_dpbsud(1, 4, 7);
    if constexpr (Sum == 2 && Rows == 5) _tile_dpbsud(2, 5, 6);
    if constexpr (Sum == 3 && Rows == 5) _tile_dpbsud(3, 5, 7);
    if constexpr (Sum == 2 && Rows == 4) _tile_dpbsud(2, 4, 6);
    if constexpr (Sum == 3 && Rows == 4) _tile_dpbsud(3, 4, 7);
  }
};

constexpr ProductKernels kKernels = amx_kernels<AmxTiles>();

}  // namespace

const ProductKernels& product_amx() { return kKernels; }

}  // namespace graphrot

#endif
