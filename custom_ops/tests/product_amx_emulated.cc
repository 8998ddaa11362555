// The AMX path with tiles in memory and products in plain loops: its logic runs where the instructions do not.
#include "common/isa.h"

#if GRAPHROT_X86

#include <cstring>

#include "matmul/product_amx.h"

namespace graphrot {
namespace {

struct Tile {
  std::size_t rows, row_bytes;
  unsigned char bytes[16][64];
};

thread_local Tile tiles[8];

struct EmulatedTiles {
  static void configure(std::size_t step) {
    for (int i = 0; i < 8; ++i) {
      tiles[i].rows = i < 6 ? 16 : step / 4;
      tiles[i].row_bytes = i == 4 || i == 5 ? step : 64;
    }
  }

  // Tiles that are not configured hold nothing.
  static void release() {
    for (Tile& tile : tiles) tile.rows = 0;
  }

  template <int T>
  static void zero() {
    std::memset(tiles[T].bytes, 0, sizeof tiles[T].bytes);
  }

  template <int T>
  static void load(const void* from, std::size_t stride) {
    zero<T>();
    for (std::size_t r = 0; r < tiles[T].rows; ++r) {
      std::memcpy(tiles[T].bytes[r], static_cast<const char*>(from) + r * stride, tiles[T].row_bytes);
    }
  }

  template <int T>
  static void store(void* to, std::size_t stride) {
    for (std::size_t r = 0; r < tiles[T].rows; ++r) {
      std::memcpy(static_cast<char*>(to) + r * stride, tiles[T].bytes[r], tiles[T].row_bytes);
    }
  }

  template <int Sum, int Rows, int Weights>
  static void add_product() {
    for (std::size_t m = 0; m < tiles[Sum].rows; ++m) {
      std::int32_t sums[16];
      std::memcpy(sums, tiles[Sum].bytes[m], sizeof sums);
      for (std::size_t k = 0; k < tiles[Rows].row_bytes; ++k) {
        const auto a = static_cast<std::int8_t>(tiles[Rows].bytes[m][k]);
        for (std::size_t n = 0; n < 16; ++n) sums[n] += a * tiles[Weights].bytes[k / 4][4 * n + k % 4];
      }
      std::memcpy(tiles[Sum].bytes[m], sums, sizeof sums);
    }
  }
};

constexpr ProductKernels kKernels = amx_kernels<EmulatedTiles>();

}  // namespace

const ProductKernels& product_amx_emulated() { return kKernels; }

}  // namespace graphrot

#endif
