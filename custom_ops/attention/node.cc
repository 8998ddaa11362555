#include "attention/node.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hadamard/attributes.h"
#include "ort/glue.h"

namespace graphrot {
namespace {

using ort::Api;
using ort::KernelContext;
using ort::KernelInfo;

enum Input : std::size_t { kQuery, kKey, kValue, kPastKey, kPastValue, kSeqlens, kTotal, kMask };
constexpr const char* kInputNames[] = {
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "mask"};
constexpr std::int64_t kMostHeads = 1 << 16, kLargestHead = 1 << 16;  // so that no product of sizes overflows

using Shape = std::vector<std::int64_t>;

[[noreturn]] void refuse(Input input, const Shape& found, const std::string& wanted) {
  throw std::invalid_argument("input '" + std::string(kInputNames[input]) + "' has the shape " + ort::words(found) +
                              "; it must be " + wanted);
}

struct Tensor {
  const void* data;
  Shape shape;
};

Tensor read_input(const Api& api, const KernelContext* context, Input input) {
  const ort::Value* value = nullptr;
  ort::check(api, api.call<ort::slot::KernelContext_GetInput>(context, static_cast<std::size_t>(input), &value));
  if (value == nullptr) throw std::invalid_argument("input '" + std::string(kInputNames[input]) + "' is missing");
  return {ort::data_of(api, value), ort::shape_of(api, value, nullptr)};
}

void* make_output(const Api& api, KernelContext* context, std::size_t index, const Shape& shape) {
  ort::Value* value = nullptr;
  const std::int64_t* dims = shape.data();
  ort::check(api, api.call<ort::slot::KernelContext_GetOutput>(context, index, dims, shape.size(), &value));
  return ort::mutable_data_of(api, value);
}

const void* read_shaped(const Api& api, const KernelContext* context, Input input, const Shape& shape,
                        const char* meaning) {
  const Tensor tensor = read_input(api, context, input);
  if (tensor.shape != shape) refuse(input, tensor.shape, std::string(meaning) + " = " + ort::words(shape));
  return tensor.data;
}

std::int64_t elements(const Shape& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

// An extent of 1 stands for all.
AttentionMask read_mask(const Api& api, const KernelContext* context, std::int64_t batch, std::int64_t heads,
                        std::int64_t tokens) {
  const Tensor tensor = read_input(api, context, kMask);
  const Shape& shape = tensor.shape;
  const std::int64_t wanted[] = {batch, heads, tokens};
  bool fits = shape.size() == 4;
  for (std::size_t axis = 0; fits && axis < 3; ++axis) fits = shape[axis] == 1 || shape[axis] == wanted[axis];
  if (!fits) {
    refuse(kMask, shape, "[batch, heads, tokens, slots], where each of the first three is 1 or as in " +
                             ort::words({batch, heads, tokens}));
  }
  AttentionMask mask{};
  mask.data = static_cast<const float*>(tensor.data);
  mask.slots = static_cast<std::size_t>(shape[3]);
  mask.by_query = shape[2] == 1 ? 0 : mask.slots;
  mask.by_head = shape[1] == 1 ? 0 : mask.slots * static_cast<std::size_t>(shape[2]);
  mask.by_row = shape[0] == 1 ? 0 : mask.slots * static_cast<std::size_t>(shape[2] * shape[1]);
  return mask;
}

}  // namespace

AttentionNode read_attention_node(const Api& api, const KernelInfo* info) {
  const auto size = [&](const char* name, std::int64_t most) {
    return static_cast<std::size_t>(ort::attribute_in_range(api, info, name, 1, most));
  };
  AttentionNode node{};
  AttentionForm& form = node.form;
  form.heads = size("num_heads", kMostHeads);
  form.kv_heads = size("kv_num_heads", kMostHeads);
  form.format.head_size = size("head_size", kLargestHead);
  form.format.bits = static_cast<int>(ort::attribute_in_range(api, info, "bits", 4, 8));
  form.score_scale = ort::attribute_float(api, info, "score_scale");
  form.softcap = ort::attribute_float(api, info, "softcap");
  form.window = ort::attribute_int(api, info, "local_window_size");
  form.causal = ort::attribute_in_range(api, info, "causal", 0, 1) != 0;
  const auto bytes = static_cast<std::int64_t>(row_bytes(form.format));
  if (const std::int64_t said = ort::attribute_int(api, info, "row_bytes"); said != bytes) {
    throw std::invalid_argument("attribute 'row_bytes' is " + std::to_string(said) +
                                ", and by 'head_size' and 'bits' a row has " + std::to_string(bytes));
  }
  const bool rotate = ort::attribute_in_range(api, info, "rotate", 0, 1) != 0;
  std::unique_ptr<HadamardTransform> rotation(new HadamardTransform(read_transform(api, info)));
  check_body_attributes(api, info, rotation->problem());
  if (rotate) node.rotation = std::move(rotation);
  node.masked = ort::has_input(api, info, kMask);
  return node;
}

AttentionCall read_attention_call(const Api& api, KernelContext* context, const AttentionForm& form, bool masked,
                                  Tensors where) {
  const KernelContext* seen = context;
  const auto heads = static_cast<std::int64_t>(form.heads), kv_heads = static_cast<std::int64_t>(form.kv_heads);
  const auto head_size = static_cast<std::int64_t>(form.format.head_size);
  const auto bytes = static_cast<std::int64_t>(row_bytes(form.format));
  const Tensor query = read_input(api, seen, kQuery);
  if (query.shape.size() != 3 || query.shape[2] != heads * head_size) {
    refuse(kQuery, query.shape, "[batch, tokens, num_heads * head_size = " + std::to_string(heads * head_size) + "]");
  }
  const std::int64_t batch = query.shape[0], tokens = query.shape[1];
  const Shape added{batch, tokens, kv_heads * head_size};
  AttentionCall call{};
  call.batch = static_cast<std::size_t>(batch);
  call.tokens = static_cast<std::size_t>(tokens);
  call.query = query.data;
  call.key = read_shaped(api, seen, kKey, added, "[batch, tokens, kv_num_heads * head_size]");
  call.value = read_shaped(api, seen, kValue, added, "[batch, tokens, kv_num_heads * head_size]");

  const Tensor past = read_input(api, seen, kPastKey);
  if (past.shape.size() != 4 || past.shape[0] != batch || past.shape[1] != kv_heads || past.shape[3] != bytes) {
    refuse(kPastKey, past.shape, "[batch = " + std::to_string(batch) + ", kv_num_heads = " + std::to_string(kv_heads) +
                                     ", slots, bytes of a row = " + std::to_string(bytes) + "]");
  }
  call.past_slots = static_cast<std::size_t>(past.shape[2]);
  call.past_key = static_cast<const std::uint8_t*>(past.data);
  call.past_value = static_cast<const std::uint8_t*>(read_shaped(api, seen, kPastValue, past.shape, "as 'past_key'"));

  const Tensor lengths = read_input(api, seen, kSeqlens);
  if (elements(lengths.shape) != batch) refuse(kSeqlens, lengths.shape, "[batch = " + std::to_string(batch) + "]");
  call.last_slots = static_cast<const std::int32_t*>(lengths.data);
  const Tensor total = read_input(api, seen, kTotal);
  if (elements(total.shape) != 1) refuse(kTotal, total.shape, "a scalar");
  const std::int64_t wanted = *static_cast<const std::int32_t*>(total.data);
  if (wanted < 0) throw std::invalid_argument("input 'total_sequence_length' is " + std::to_string(wanted));
  const std::int64_t slots = wanted > past.shape[2] ? wanted : past.shape[2];
  call.slots = static_cast<std::size_t>(slots);
  if (masked) call.mask = read_mask(api, seen, batch, heads, tokens);
  if (where == Tensors::kHere) {
    check_attention_call(call);
  } else {
    check_attention_sizes(call);
  }

  call.output = make_output(api, context, 0, query.shape);
  const Shape present{batch, kv_heads, slots, bytes};
  call.present_key = static_cast<std::uint8_t*>(make_output(api, context, 1, present));
  call.present_value = static_cast<std::uint8_t*>(make_output(api, context, 2, present));
  return call;
}

}  // namespace graphrot
