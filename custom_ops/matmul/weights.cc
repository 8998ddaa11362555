#include "matmul/weights.h"

#include <stdexcept>
#include <string>

namespace graphrot {
namespace {

constexpr std::size_t kAlign = 64;
constexpr std::size_t kLargestGroup = 65536;  // 65536 * 127 * 255 fits into the 32 bits of a sum

void refuse(const std::string& words) { throw std::invalid_argument(words); }

constexpr std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }

// Eight codes of 4 bits in the order 0, 4, 1, 5, 2, 6, 3, 7: the first four become low halves.
std::uint32_t interleaved(std::uint32_t codes) {
  const auto spread = [](std::uint32_t half) {
    half = (half | (half << 8)) & 0x00ff00ffu;
    return (half | (half << 4)) & 0x0f0f0f0fu;
  };
  return spread(codes & 0xffffu) | (spread(codes >> 16) << 4);
}

std::uint32_t four_bytes(const std::uint8_t* from) {
  return static_cast<std::uint32_t>(from[0]) | (static_cast<std::uint32_t>(from[1]) << 8) |
         (static_cast<std::uint32_t>(from[2]) << 16) | (static_cast<std::uint32_t>(from[3]) << 24);
}

void put_four_bytes(std::uint32_t value, std::uint8_t* to) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

// Sixteen columns at a time: their rows are read side by side, and more would not stay in the nearest cache.
void pack_codes(const WeightSource& source, const ProductProblem& problem, std::uint8_t* to) {
  constexpr std::size_t kColumns = 16;
  const std::size_t blocks = divide_up(source.channels, source.block);
  const std::size_t row = blocks * source.block * static_cast<std::size_t>(source.bits) / 8;
  for (std::size_t start = 0; start < source.columns; start += kColumns) {
    const std::size_t tile = start / kTileColumns, part = start % kTileColumns / kColumns;
    const std::size_t count = source.columns - start < kColumns ? source.columns - start : kColumns;
    std::uint8_t* unit = to + tile * problem.units * kUnitBytes + part * kColumns * 4;
    for (std::size_t u = 0; u < problem.units; ++u, unit += kUnitBytes) {
      for (std::size_t c = 0; c < count; ++c) {
        const std::uint32_t codes = four_bytes(source.codes + (start + c) * row + u * 4);
        put_four_bytes(source.bits == 4 ? interleaved(codes) : codes, unit + 4 * c);
      }
    }
  }
}

void pack_groups(const WeightSource& source, const ProductProblem& problem, float* scales, std::uint8_t* zeros) {
  const std::size_t bits = static_cast<std::size_t>(source.bits);
  const std::size_t zero_row = divide_up(divide_up(source.channels, source.block) * bits, 8);
  for (std::size_t n = 0; n < source.columns; ++n) {
    for (std::size_t g = 0; g < problem.groups; ++g) {
      const std::size_t to = (n / kTileColumns * problem.groups + g) * kTileColumns + n % kTileColumns;
      scales[to] = source.scales[n * problem.groups + g];
      if (zeros == nullptr) continue;
      const unsigned byte = source.zeros[n * zero_row + g * bits / 8];
      zeros[to] = static_cast<std::uint8_t>(bits == 8 ? byte : (byte >> (4 * (g % 2))) & 15u);
    }
  }
}

}  // namespace

void check_weights(std::size_t channels, std::size_t columns, std::size_t group, std::size_t block, int bits) {
  if (bits != 4 && bits != 8) refuse("attribute 'bits' is " + std::to_string(bits) + "; weights have 4 or 8 bits");
  if (channels == 0 || columns == 0) refuse("attributes 'K' and 'N' must be at least 1");
  if (block < 16 || (block & (block - 1)) != 0) {
    refuse("attribute 'block' is " + std::to_string(block) + "; it must be a power of two from 16 on");
  }
  const bool whole = group == channels;
  if (!whole && (group < 32 || group > 128 || group != block)) {
    refuse("a scale for every " + std::to_string(group) + " channels does not go with blocks of " +
           std::to_string(block) + " and K = " + std::to_string(channels));
  }
  if (group > kLargestGroup) {
    refuse("one scale for " + std::to_string(group) + " channels: sums of more than " + std::to_string(kLargestGroup) +
           " products do not fit into 32 bits");
  }
}

ProductWeights::ProductWeights(const WeightSource& source) : problem_{} {
  check_weights(source.channels, source.columns, source.group, source.block, source.bits);
  problem_.channels = source.channels;
  problem_.columns = source.columns;
  problem_.group = source.group;
  problem_.groups = divide_up(source.channels, source.group);
  problem_.tiles = divide_up(source.columns, kTileColumns);
  problem_.units = divide_up(source.channels, 8) * (source.bits == 4 ? 1 : 2);
  problem_.bits = source.bits;
  problem_.zero = source.bits == 4 ? 8 : 128;
  const std::size_t codes = problem_.tiles * problem_.units * kUnitBytes;
  const std::size_t entries = problem_.tiles * problem_.groups * kTileColumns;
  const std::size_t zeros = source.zeros != nullptr ? entries : 0;
  const std::size_t bias = source.bias != nullptr ? problem_.tiles * kTileColumns : 0;
  memory_.reset(new std::uint8_t[kAlign + codes + (entries + bias) * sizeof(float) + zeros]());
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
  std::uint8_t* to = memory_.get() + (kAlign - address % kAlign);
  auto* scales = reinterpret_cast<float*>(to + codes);
  float* bias_to = scales + entries;
  auto* zeros_to = reinterpret_cast<std::uint8_t*>(bias_to + bias);
  pack_codes(source, problem_, to);
  pack_groups(source, problem_, scales, zeros != 0 ? zeros_to : nullptr);
  for (std::size_t n = 0; bias != 0 && n < source.columns; ++n) bias_to[n] = source.bias[n];
  problem_.codes = to;
  problem_.scales = scales;
  problem_.zeros = zeros != 0 ? zeros_to : nullptr;
  problem_.bias = bias != 0 ? bias_to : nullptr;
}

}  // namespace graphrot
