#include "matmul/node.h"

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/element.h"
#include "hadamard/attributes.h"
#include "ort/glue.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::KernelInfo;

enum Input : std::size_t { kCodes = 1, kScales = 2, kZeros = 3, kBias = 4 };
constexpr const char* kInputNames[] = {"X", "B", "scales", "zero_points", "bias"};
constexpr std::int64_t kLargest = std::int64_t{1} << 24;  // of K and N, so that no product of sizes overflows

struct Constant {
  const void* data;
  ort::ElementType type;
};

Constant read_constant(const Api& api, const KernelInfo* info, Input input, const std::vector<std::int64_t>& shape) {
  const ort::Value* value = ort::constant_input(api, info, input, kInputNames[input]);
  Constant constant{};
  const std::vector<std::int64_t> found = ort::shape_of(api, value, &constant.type);
  if (found != shape) {
    throw std::invalid_argument("input '" + std::string(kInputNames[input]) + "' has the shape " + ort::words(found) + "; by the attributes it is " +
                                ort::words(shape));
  }
  constant.data = ort::data_of(api, value);
  return constant;
}

const void* data_of_type(const Constant& constant, ort::ElementType type, Input input, const char* kind) {
  if (constant.type == type) return constant.data;
  throw std::invalid_argument("input '" + std::string(kInputNames[input]) + "' must hold " + kind);
}

std::vector<float> as_floats(const Constant& constant, std::size_t count) {
  if (constant.type == ort::kFloat16) {
    const auto* from = static_cast<const Half*>(constant.data);
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = to_float(from[i]);
    return values;
  }
  const auto* from = static_cast<const float*>(data_of_type(constant, ort::kFloat32, kScales, "float or float16"));
  return std::vector<float>(from, from + count);
}

struct ZeroPoints {
  const std::uint8_t* packed;
  std::int64_t columns, blocks, bits;

  unsigned at(std::int64_t column, std::int64_t block) const {
    const unsigned byte = packed[column * ((blocks * bits + 7) / 8) + block * bits / 8];
    return bits == 8 ? byte : (byte >> (4 * (block % 2))) & 15u;
  }
};

// One scale per column, but zero points in the storage of blocks: all of a row must say the same.
void check_equal(const ZeroPoints& zeros) {
  for (std::int64_t n = 0; n < zeros.columns; ++n) {
    for (std::int64_t block = 1; block < zeros.blocks; ++block) {
      if (zeros.at(n, block) == zeros.at(n, 0)) continue;
      throw std::invalid_argument("input 'zero_points' differs within row " + std::to_string(n) +
                                  ", which has one scale");
    }
  }
}

// Zero points that are given only because a bias follows them (older runtimes crash on an input that is left out in
// front of another) say nothing: the kernel is faster without.
bool all_in_the_middle(const ZeroPoints& zeros) {
  const unsigned middle = 1u << (zeros.bits - 1);
  for (std::int64_t n = 0; n < zeros.columns; ++n) {
    for (std::int64_t block = 0; block < zeros.blocks; ++block) {
      if (zeros.at(n, block) != middle) return false;
    }
  }
  return true;
}

// Attributes that serve the function body alone. A node whose two forms disagree would answer differently from one
// machine to the next.
void check_body(const Api& api, const KernelInfo* info, int levels, std::int64_t columns, std::int64_t blocks) {
  if (ort::attribute_float(api, info, "levels") != static_cast<float>(levels) ||
      ort::attribute_ints(api, info, "scales_shape") != std::vector<std::int64_t>{columns, blocks}) {
    throw std::invalid_argument("attributes 'levels' and 'scales_shape' do not go with 'activation_bits', 'N', 'K' and 'block'");
  }
}

}  // namespace

MatMulNode read_matmul_node(const Api& api, const KernelInfo* info) {
  const std::int64_t channels = ort::attribute_in_range(api, info, "K", 1, kLargest), columns = ort::attribute_in_range(api, info, "N", 1, kLargest);
  const std::int64_t bits = ort::attribute_in_range(api, info, "bits", 4, 8), activation_bits = ort::attribute_in_range(api, info, "activation_bits", 4, 8);
  if (activation_bits != 4 && activation_bits != 8) {
    throw std::invalid_argument("attribute 'activation_bits' is " + std::to_string(activation_bits) + "; it must be 4 or 8");
  }
  const std::int64_t block_size = ort::attribute_in_range(api, info, "block_size", 0, 128), block = ort::attribute_in_range(api, info, "block", 16, kLargest);
  if (block_size != 0 && block_size != block) {
    throw std::invalid_argument("attribute 'block' is " + std::to_string(block) + ", and 'block_size' " + std::to_string(block_size));
  }
  const std::int64_t blocks = (channels + block - 1) / block;
  if (blocks * block > 2 * kLargest) throw std::invalid_argument("attribute 'block' is too large for 'K'");

  MatMulNode node{};
  node.levels = activation_bits == 8 ? 127 : 7;
  check_body(api, info, node.levels, columns, blocks);
  WeightSource& weights = node.weights;
  weights.channels = static_cast<std::size_t>(channels);
  weights.columns = static_cast<std::size_t>(columns);
  weights.bits = static_cast<int>(bits);
  weights.block = static_cast<std::size_t>(block);
  // A group that reaches over the whole row is one scale per column.
  weights.group = block_size == 0 || blocks == 1 ? weights.channels : weights.block;
  weights.codes = static_cast<const std::uint8_t*>(data_of_type(
      read_constant(api, info, kCodes, {columns, blocks, block * bits / 8}), ort::kUint8, kCodes, "uint8"));
  const bool grouped = block_size != 0;
  const Constant scales = read_constant(
      api, info, kScales, grouped ? std::vector<std::int64_t>{columns, blocks} : std::vector<std::int64_t>{columns});
  node.scales = as_floats(scales, static_cast<std::size_t>(grouped ? columns * blocks : columns));
  weights.scales = node.scales.data();
  if (ort::has_input(api, info, kZeros)) {
    const Constant zeros = read_constant(api, info, kZeros, {columns, (blocks * bits + 7) / 8});
    weights.zeros = static_cast<const std::uint8_t*>(data_of_type(zeros, ort::kUint8, kZeros, "uint8"));
    const ZeroPoints points{weights.zeros, columns, blocks, bits};
    if (!grouped) check_equal(points);
    if (all_in_the_middle(points)) weights.zeros = nullptr;
  }
  if (ort::has_input(api, info, kBias)) {
    weights.bias = static_cast<const float*>(
        data_of_type(read_constant(api, info, kBias, {columns}), ort::kFloat32, kBias, "float"));
  }
  const std::int64_t rotate = ort::attribute_in_range(api, info, "rotate", 0, 1);
  std::unique_ptr<HadamardTransform> rotation(new HadamardTransform(read_transform(api, info)));
  check_body_attributes(api, info, rotation->problem());
  if (rotate != 0) node.rotation = std::move(rotation);
  return node;
}

}  // namespace graphrot
