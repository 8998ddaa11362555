// Weights of 4 or 8 bits, repacked once from the storage of MatMulNBits for the kernels of the product.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace graphrot {

inline constexpr std::size_t kTileColumns = 64;
inline constexpr std::size_t kUnitBytes = 256;  // 64 columns of 8 channels (4 bits) or of 4 channels (8 bits)

// What a kernel reads: plain data, padded to whole tiles of 64 columns. Every path reads the same layout.
//   codes: [tiles][units][4][16 columns][4 bytes]. With 4 bits, byte i of a unit's column holds channel i in its low
//     half and channel 4 + i in its high half; with 8 bits, channel i. Channels are padded to a multiple of 8.
//   scales: [tiles][groups][64]; zeros: the same in uint8, or null when all are `zero`; bias: [tiles][64], or null.
struct ProductProblem {
  std::size_t channels;  // K
  std::size_t columns;   // N
  std::size_t group;     // channels that share a scale: K, or 32, 64 or 128 (the last group may be short)
  std::size_t groups;    // ceil(K / group)
  std::size_t tiles;     // ceil(N / 64)
  std::size_t units;     // per tile
  int bits;              // 4 or 8
  int zero;              // 8 or 128: the code of zero where `zeros` is null
  const std::uint8_t* codes;
  const float* scales;
  const std::uint8_t* zeros;
  const float* bias;
};

// Tensors in the storage of MatMulNBits; they are not needed after the weights are repacked.
struct WeightSource {
  std::size_t channels;
  std::size_t columns;
  std::size_t group;          // channels that share a scale; K for one scale per column
  std::size_t block;          // block length of the storage: the group, or for one scale per column any
  int bits;
  const std::uint8_t* codes;  // [N, ceil(K / block), block * bits / 8], low half first
  const float* scales;        // [N, ceil(K / group)]
  const std::uint8_t* zeros;  // [N, ceil(ceil(K / block) * bits / 8)], or null; with one scale, the first counts
  const float* bias;          // [N], or null
};

// Throws std::invalid_argument, in words for people, when the numbers do not fit together.
void check_weights(std::size_t channels, std::size_t columns, std::size_t group, std::size_t block, int bits);

// The problem with the memory that it points to.
class ProductWeights {
 public:
  // Throws std::invalid_argument, in words for people, when the numbers do not fit together.
  explicit ProductWeights(const WeightSource& source);

  const ProductProblem& problem() const { return problem_; }

  ProductWeights(const ProductWeights&) = delete;
  ProductWeights& operator=(const ProductWeights&) = delete;

 private:
  ProductProblem problem_;
  std::unique_ptr<std::uint8_t[]> memory_;
};

}  // namespace graphrot
