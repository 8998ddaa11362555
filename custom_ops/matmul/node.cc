#include "matmul/node.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

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

constexpr std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }

std::vector<float> as_floats(const MatMulForm& form, std::size_t count) {
  if (form.half_scales) {
    const auto* from = static_cast<const Half*>(form.scales);
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = to_float(from[i]);
    return values;
  }
  const auto* from = static_cast<const float*>(form.scales);
  return std::vector<float>(from, from + count);
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

MatMulForm read_matmul_form(const Api& api, const KernelInfo* info) {
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

  MatMulForm form{};
  form.levels = activation_bits == 8 ? 127 : 7;
  check_body(api, info, form.levels, columns, blocks);
  WeightSource& weights = form.weights;
  weights.channels = static_cast<std::size_t>(channels);
  weights.columns = static_cast<std::size_t>(columns);
  weights.bits = static_cast<int>(bits);
  weights.block = static_cast<std::size_t>(block);
  // A group that reaches over the whole row is one scale per column.
  weights.group = block_size == 0 || blocks == 1 ? weights.channels : weights.block;
  weights.codes = static_cast<const std::uint8_t*>(data_of_type(
      read_constant(api, info, kCodes, {columns, blocks, block * bits / 8}), ort::kUint8, kCodes, "uint8"));
  const Constant scales = read_constant(
      api, info, kScales, block_size != 0 ? std::vector<std::int64_t>{columns, blocks} : std::vector<std::int64_t>{columns});
  form.half_scales = scales.type == ort::kFloat16;
  form.scales = form.half_scales ? scales.data : data_of_type(scales, ort::kFloat32, kScales, "float or float16");
  if (ort::has_input(api, info, kZeros)) {
    const Constant zeros = read_constant(api, info, kZeros, {columns, (blocks * bits + 7) / 8});
    weights.zeros = static_cast<const std::uint8_t*>(data_of_type(zeros, ort::kUint8, kZeros, "uint8"));
  }
  if (ort::has_input(api, info, kBias)) {
    weights.bias = static_cast<const float*>(
        data_of_type(read_constant(api, info, kBias, {columns}), ort::kFloat32, kBias, "float"));
  }
  const std::int64_t rotate = ort::attribute_in_range(api, info, "rotate", 0, 1);
  std::unique_ptr<HadamardTransform> rotation(new HadamardTransform(read_transform(api, info)));
  check_body_attributes(api, info, rotation->problem());
  if (rotate != 0) form.rotation = std::move(rotation);
  return form;
}

MatMulNode read_matmul_node(const Api& api, const KernelInfo* info) {
  MatMulForm form = read_matmul_form(api, info);
  MatMulNode node{};
  node.weights = form.weights;
  node.weights.zeros = telling_zeros(form.weights);
  node.scales = as_floats(form, form.weights.columns * divide_up(form.weights.channels, form.weights.group));
  node.weights.scales = node.scales.data();
  node.levels = form.levels;
  node.rotation = std::move(form.rotation);
  return node;
}

MatMulCall read_matmul_call(const Api& api, ort::KernelContext* context, std::size_t channels, std::size_t columns) {
  const ort::KernelContext* seen = context;
  const ort::Value* input = nullptr;
  ort::check(api, api.call<ort::slot::KernelContext_GetInput>(seen, std::size_t{0}, &input));
  std::vector<std::int64_t> shape = ort::shape_of(api, input, nullptr);
  if (shape.empty() || shape.back() != static_cast<std::int64_t>(channels)) {
    throw std::invalid_argument("the last axis of the input has " + (shape.empty() ? "no" : std::to_string(shape.back())) +
                                " channels, and K is " + std::to_string(channels));
  }
  shape.back() = static_cast<std::int64_t>(columns);
  MatMulCall call{nullptr, nullptr, 1};
  for (std::size_t axis = 0; axis + 1 < shape.size(); ++axis) call.rows *= static_cast<std::size_t>(shape[axis]);
  ort::Value* output = nullptr;
  const std::int64_t* dims = shape.data();
  ort::check(api, api.call<ort::slot::KernelContext_GetOutput>(context, std::size_t{0}, dims, shape.size(), &output));
  if (call.rows == 0) return call;
  call.in = ort::data_of(api, input);
  call.out = ort::mutable_data_of(api, output);
  return call;
}

std::size_t zeros_bytes(const WeightSource& weights) {
  const std::size_t blocks = divide_up(weights.channels, weights.block);
  return weights.columns * divide_up(blocks * static_cast<std::size_t>(weights.bits), 8);
}

// Zero points that are given only because a bias follows them (older runtimes crash on an input that is left out in
// front of another) say nothing.
const std::uint8_t* telling_zeros(const WeightSource& weights) {
  if (weights.zeros == nullptr) return nullptr;
  const auto bits = static_cast<std::size_t>(weights.bits);
  const std::size_t blocks = divide_up(weights.channels, weights.block), row = divide_up(blocks * bits, 8);
  const auto at = [&](std::size_t column, std::size_t block) {
    const unsigned byte = weights.zeros[column * row + block * bits / 8];
    return bits == 8 ? byte : (byte >> (4 * (block % 2))) & 15u;
  };
  bool middle = true;
  for (std::size_t n = 0; n < weights.columns; ++n) {
    for (std::size_t block = 0; block < blocks; ++block) {
      if (weights.group == weights.channels && at(n, block) != at(n, 0)) {
        throw std::invalid_argument("input 'zero_points' differs within row " + std::to_string(n) +
                                    ", which has one scale");
      }
      middle = middle && at(n, block) == 1u << (bits - 1);
    }
  }
  return middle ? nullptr : weights.zeros;
}

}  // namespace graphrot
