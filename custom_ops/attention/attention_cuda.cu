// How a call is cut into blocks, and its kernels one after another.
#include "attention/attention_cuda.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention/attend_cuda.h"
#include "attention/store_cuda.h"
#include "common/cuda/device.cuh"

namespace graphrot {
namespace {

using cuda::AttendShape;

constexpr unsigned kOctet = 8;
constexpr unsigned kFewQueries = 16;  // of a KV head; more are worth the tiles of many
constexpr std::size_t kAlignment = 256, kVectorBytes = 16, kWordBytes = 4;
constexpr std::size_t kLeastHead = 16, kHeadStep = 16, kWidestCudaHead = 256;
constexpr float kLog2E = 1.44269504f;
constexpr std::size_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr std::size_t kMostBytes = std::numeric_limits<std::int64_t>::max();

unsigned divide_up(std::size_t value, std::size_t by) { return static_cast<unsigned>((value + by - 1) / by); }

struct Plan {
  AttendShape shape;
  bool few;
  struct {
    std::size_t queries, units, sums, totals, bytes;  // where they begin, and all
  } scratch;
};

void refuse_if(bool wrong, const std::string& words) {
  if (wrong) throw std::invalid_argument(words);
}

void check_sizes(const AttentionForm& form, const AttentionCall& call) {
  const std::size_t row = row_bytes(form.format);
  refuse_if(call.tokens > call.slots, "the cache has " + std::to_string(call.slots) + " slots, too few for " +
                                          std::to_string(call.tokens) + " new tokens");
  refuse_if(call.past_slots > call.slots, "the cache's past has " + std::to_string(call.past_slots) +
                                              " slots, and its present " + std::to_string(call.slots));
  const bool same = call.past_key == call.present_key || call.past_value == call.present_value;
  const bool in_place = call.past_slots != 0 && call.present_key != nullptr && same;
  refuse_if(in_place && call.past_slots != call.slots,
            "past and present of the cache are the same memory, and have " + std::to_string(call.past_slots) + " and " +
                std::to_string(call.slots) + " slots");
  const bool huge = call.slots > kMost / 2 || call.batch > kMost || call.tokens > kMost / form.heads ||
                    (call.batch != 0 && call.tokens * form.heads > kMost / 2 / call.batch) ||
                    (call.batch != 0 && call.slots > kMostBytes / row / form.kv_heads / call.batch);
  refuse_if(huge, "batch " + std::to_string(call.batch) + " with " + std::to_string(call.tokens) + " tokens and " +
                      std::to_string(call.slots) + " slots is too large for one call on CUDA");
}

// Runs of slots, so that all multiprocessors have work where there are few queries. From the capacity: how many of them
// have something to do is found on the device.
unsigned runs_of(const Plan& plan, const CudaDevice& device) {
  const AttendShape& shape = plan.shape;
  const unsigned channels = cuda::padded_channels(shape.head_size);
  const int few = channels > 128 ? cuda::kFewBlocks<256> : channels > 64 ? cuda::kFewBlocks<128> : cuda::kFewBlocks<64>;
  const int many = channels > 64 ? cuda::kManyBlocks<128> : cuda::kManyBlocks<64>;
  const int blocks = plan.few ? few : many;
  const unsigned wanted = static_cast<unsigned>(device.multiprocessors * blocks) / (shape.tasks * shape.tiles);
  const unsigned most = divide_up(shape.slots, std::size_t{shape.tile_slots} * shape.least_tiles);
  const unsigned runs = wanted < most ? wanted : most;
  return runs < 1 ? 1 : runs;
}

// Queries and slots into tiles, for one kernel or the other.
void cut(Plan& plan, int bits, bool few) {
  AttendShape& shape = plan.shape;
  const unsigned channels = cuda::padded_channels(shape.head_size);
  const bool wide = channels > 128;
  plan.few = few;
  const int each = wide ? cuda::kManyOctets<256> : cuda::kManyOctets<128>;
  const int octets = plan.few ? 1 : static_cast<int>(cuda::kManyWarps) * each;
  const int few_slots = bits == 4 && !wide ? cuda::kFewSlots<4, 128> : cuda::kFewSlots<8, 256>;
  shape.tile_rows = kOctet * static_cast<unsigned>(octets);
  shape.tile_slots = static_cast<unsigned>(plan.few ? few_slots : cuda::kManySlots);
  shape.least_tiles = plan.few ? cuda::kFewWarps : 2;
  shape.tiles = divide_up(shape.rows, shape.tile_rows);
  shape.octets = shape.tiles * shape.tile_rows / kOctet;
  // Products take padded channels: behind the last row so many words are read, and come to nothing.
  const unsigned padded_words = channels / (bits == 4 ? 8 : 4);
  const unsigned behind = padded_words > shape.row_words ? padded_words - shape.row_words : 0;
  shape.tile_pieces = divide_up(3 + std::size_t{shape.tile_slots} * shape.row_words + behind, 4);
}

Plan plan_of(const AttentionForm& form, const AttentionCall& call) {
  check_sizes(form, call);
  Plan plan{};
  AttendShape& shape = plan.shape;
  const int bits = form.format.bits;
  shape.head_size = static_cast<unsigned>(form.format.head_size);
  shape.code_words = static_cast<unsigned>(code_bytes(form.format) / kWordBytes);
  shape.row_words = static_cast<unsigned>(row_bytes(form.format) / kWordBytes);
  shape.heads = static_cast<unsigned>(form.heads);
  shape.kv_heads = static_cast<unsigned>(form.kv_heads);
  shape.group = shape.heads / shape.kv_heads;
  shape.tokens = static_cast<unsigned>(call.tokens);
  shape.tasks = static_cast<unsigned>(call.batch) * shape.kv_heads;
  shape.rows = shape.tokens * shape.group;
  const unsigned channels = cuda::padded_channels(shape.head_size);
  const CudaDevice device = current_device();
  cut(plan, bits, shape.rows <= kFewQueries);
  // The tiles of few queries, 8 bits and 256 channels are more than the smallest devices (sm_86) have for a block.
  if (plan.few && cuda::few_shared_bytes(shape) > device.shared_bytes) cut(plan, bits, false);
  shape.slots = static_cast<unsigned>(call.slots);
  const bool windowed = form.window >= 0 && form.window <= static_cast<std::int64_t>(kMost);
  shape.window = windowed ? static_cast<int>(form.window) : -1;
  shape.causal = form.causal;
  shape.cap = form.softcap * kLog2E;
  shape.scaled = form.softcap > 0.0f || call.mask.data != nullptr;
  shape.runs = shape.tasks * shape.tiles == 0 ? 1 : runs_of(plan, device);

  std::size_t end = 0;
  const auto part = [&end](std::size_t bytes) {
    const std::size_t start = end;
    end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return start;
  };
  const std::size_t all_octets = std::size_t{shape.tasks} * shape.octets;
  const std::size_t parts = std::size_t{shape.tasks} * shape.tiles * shape.runs;
  const std::size_t results = shape.runs > 1 ? parts * shape.tile_rows : 0;
  plan.scratch.queries = part(all_octets * channels * sizeof(uint4));
  plan.scratch.units = part(all_octets * kOctet * sizeof(float2));
  plan.scratch.sums = part(results * shape.head_size * sizeof(float));
  plan.scratch.totals = part(results * sizeof(float2));
  plan.scratch.bytes = end;
  return plan;
}

void check_alignment(const char* name, const void* pointer, std::size_t bytes) {
  refuse_if(reinterpret_cast<std::uintptr_t>(pointer) % bytes != 0,
            "the memory of '" + std::string(name) + "' must begin at a multiple of " + std::to_string(bytes) +
                " bytes");
}

void check_pointers(const AttentionCall& call) {
  check_alignment("query", call.query, kVectorBytes);
  check_alignment("key", call.key, kVectorBytes);
  check_alignment("value", call.value, kVectorBytes);
  check_alignment("output", call.output, kVectorBytes);
  check_alignment("past_key", call.past_key, kWordBytes);
  check_alignment("past_value", call.past_value, kWordBytes);
  check_alignment("present_key", call.present_key, kWordBytes);
  check_alignment("present_value", call.present_value, kWordBytes);
}

}  // namespace

void check_attention_cuda(const AttentionForm& form, std::size_t rotation_size) {
  check_attention_form(form, rotation_size);
  const std::size_t size = form.format.head_size;
  refuse_if(size < kLeastHead || size > kWidestCudaHead || size % kHeadStep != 0,
            "attribute 'head_size' is " + std::to_string(size) + "; on CUDA it must be a multiple of " +
                std::to_string(kHeadStep) + " from " + std::to_string(kLeastHead) + " to " +
                std::to_string(kWidestCudaHead));
}

std::size_t attention_cuda_scratch_bytes(const AttentionForm& form, const AttentionCall& call) {
  return plan_of(form, call).scratch.bytes;
}

void attention_cuda(const AttentionForm& form, const CudaHadamard* rotation, Element element, const AttentionCall& call,
                    void* scratch, CudaStream stream) {
  check_attention_cuda(form, rotation != nullptr ? rotation->size : 0);
  check_pointers(call);
  Plan plan = plan_of(form, call);
  AttendShape& shape = plan.shape;
  const std::size_t words = std::size_t{shape.slots} * shape.row_words, kept = call.past_slots * shape.row_words;
  const auto carry = [&](const std::uint8_t* past, std::uint8_t* present) {
    if (past != present && shape.tasks != 0 && words != 0) {
      cuda::carry_rows(past, present, shape.tasks, kept, words, stream);
    }
  };
  carry(call.past_key, call.present_key);
  carry(call.past_value, call.present_value);
  if (shape.tasks == 0 || shape.tokens == 0) return;

  auto* const memory = static_cast<unsigned char*>(scratch);
  shape.mask = call.mask.data;
  shape.mask_by_row = call.mask.by_row;
  shape.mask_by_head = call.mask.by_head;
  shape.mask_by_query = call.mask.by_query;
  shape.mask_slots = call.mask.slots < shape.slots ? static_cast<int>(call.mask.slots) : static_cast<int>(shape.slots);
  shape.keys = call.present_key;
  shape.values = call.present_value;
  shape.cache_bytes = shape.tasks * words * kWordBytes;
  shape.last_slots = call.last_slots;
  shape.queries = reinterpret_cast<uint4*>(memory + plan.scratch.queries);
  shape.units = reinterpret_cast<float2*>(memory + plan.scratch.units);
  shape.sums = reinterpret_cast<float*>(memory + plan.scratch.sums);
  shape.totals = reinterpret_cast<float2*>(memory + plan.scratch.totals);
  shape.output = call.output;
  shape.element = element;

  cuda::StoreShape store{};
  store.attend = shape;
  store.query = call.query;
  store.key = call.key;
  store.value = call.value;
  store.present_key = call.present_key;
  store.present_value = call.present_value;
  store.rotated = rotation != nullptr;
  if (rotation != nullptr) store.rotation = *rotation;
  store.width = cuda::padded_channels(shape.head_size) / 8;
  const std::size_t vectors = 32 / store.width;
  store.query_warps = divide_up(std::size_t{shape.tasks} * shape.octets * kOctet, vectors);
  store.key_warps = divide_up(std::size_t{shape.tasks} * shape.tokens, vectors);
  const float to_powers = form.softcap > 0.0f ? 2.0f * kLog2E / form.softcap : kLog2E;  // of what tanh takes, or 2^x
  store.unit = std::fabs(form.score_scale) * to_powers;
  store.sign = form.score_scale < 0.0f ? -1.0f : 1.0f;
  cuda::store_vectors(store, form.format.bits, stream);
  if (plan.few) {
    cuda::attend_few(shape, form.format.bits, stream);
  } else {
    cuda::attend_many(shape, form.format.bits, stream);
  }
  if (shape.runs > 1) cuda::combine_runs(shape, stream);
}

}  // namespace graphrot
