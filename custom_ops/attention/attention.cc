#include "attention/attention.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace graphrot {
namespace {

constexpr std::size_t kStoreFloats = 1 << 13;  // of one task
constexpr std::size_t kFewQueries = 16;        // of a KV head: the slots are cut in runs
constexpr std::size_t kRuns = 4;
constexpr std::size_t kLeastBlocks = 4;  // of a run
constexpr std::size_t kTileStep = 8;
constexpr std::size_t kLineFloats = 16;

std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }
std::size_t aligned(std::size_t floats) { return divide_up(floats, kLineFloats) * kLineFloats; }

// The slot of a row's first new token.
std::size_t start_of(const AttentionCall& call, std::size_t row) {
  const auto used = static_cast<std::size_t>(std::int64_t{call.last_slots[row]} + 1);
  return used > call.tokens ? used - call.tokens : 0;
}

}  // namespace

Attention::Attention(const AttentionForm& form, std::unique_ptr<HadamardTransform> rotation, Element element, Isa isa)
    : form_(form),
      rotation_(std::move(rotation)),
      group_(form.kv_heads == 0 ? 0 : form.heads / form.kv_heads),
      row_bytes_(row_bytes(form.format)),
      element_bytes_(element == Element::kFloat ? 4 : 2),
      element_(static_cast<int>(element)),
      cache_(cache_kernels(isa)),
      rotate_(hadamard_kernels(isa).run[static_cast<int>(Element::kFloat)]),
      problem_(attend_problem(form.format, form.score_scale, form.softcap)),
      attend_(attend_kernel(problem_, isa)) {
  check_attention_form(form, rotation_ != nullptr ? rotation_->problem().size : 0);
}

void check_attention_form(const AttentionForm& form, std::size_t rotation_size) {
  if (form.kv_heads == 0 || form.heads == 0 || form.heads % form.kv_heads != 0) {
    throw std::invalid_argument("attribute 'num_heads' is " + std::to_string(form.heads) +
                                ", which is no multiple of 'kv_num_heads' " + std::to_string(form.kv_heads));
  }
  const std::size_t size = form.format.head_size;
  if (size == 0 || size % 2 != 0) {
    throw std::invalid_argument("attribute 'head_size' is " + std::to_string(size) +
                                "; it must be even and at least 2");
  }
  if (form.format.bits != 4 && form.format.bits != 8) {
    throw std::invalid_argument("attribute 'bits' is " + std::to_string(form.format.bits) + "; it must be 4 or 8");
  }
  if (!std::isfinite(form.score_scale)) throw std::invalid_argument("attribute 'score_scale' must be finite");
  if (!(form.softcap >= 0.0f) || !std::isfinite(form.softcap)) {
    throw std::invalid_argument("attribute 'softcap' must be zero, for none, or a positive number");
  }
  if (form.window < -1) {
    throw std::invalid_argument("attribute 'local_window_size' is " + std::to_string(form.window) +
                                "; it must be at least 0, or -1 for none");
  }
  if (rotation_size != 0 && size % rotation_size != 0) {
    throw std::invalid_argument("attribute 'head_size' is " + std::to_string(size) +
                                ", which is no multiple of the transform's size " +
                                std::to_string(rotation_size));
  }
}

void check_attention_sizes(const AttentionCall& call) {
  if (call.tokens > call.slots) {
    throw std::invalid_argument("the cache has " + std::to_string(call.slots) + " slots, too few for " +
                                std::to_string(call.tokens) + " new tokens");
  }
}

void check_attention_call(const AttentionCall& call) {
  for (std::size_t row = 0; row < call.batch; ++row) {
    const std::int64_t used = std::int64_t{call.last_slots[row]} + 1;
    const auto slots = static_cast<std::int64_t>(call.slots);
    if (used < 0 || used > slots) {
      throw std::invalid_argument("input 'seqlens_k' is " + std::to_string(used - 1) + " for row " +
                                  std::to_string(row) + ": the cache has " + std::to_string(slots) +
                                  " slots, so it must be from -1 to " + std::to_string(slots - 1));
    }
    check_attention_sizes(call);
    if (call.mask.data != nullptr && start_of(call, row) + call.tokens > call.mask.slots) {
      throw std::invalid_argument("input 'mask' has " + std::to_string(call.mask.slots) +
                                  " slots in its last axis, and row " + std::to_string(row) + " uses " +
                                  std::to_string(start_of(call, row) + call.tokens));
    }
  }
}

// What was in the past and is not in place.
void Attention::carry_on(const AttentionCall& call, std::size_t task) const {
  const std::size_t kept = call.past_slots * row_bytes_, all = call.slots * row_bytes_;
  const auto copy = [&](const std::uint8_t* past, std::uint8_t* present) {
    if (past == present) return;
    if (kept != 0) std::memcpy(present + task * all, past + task * kept, kept);
    if (all != kept) std::memset(present + task * all + kept, 0, all - kept);
  };
  copy(call.past_key, call.present_key);
  copy(call.past_value, call.present_value);
}

std::size_t Attention::store_chunk(std::size_t tokens) const {
  const std::size_t chunk = kStoreFloats / (form_.kv_heads * form_.format.head_size);
  return chunk < 1 ? 1 : (chunk < tokens ? chunk : tokens);
}

void Attention::store(const AttentionCall& call, std::size_t chunk, std::size_t task, ScratchPool& pool) const {
  const std::size_t chunks = divide_up(call.tokens, chunk), row = task / chunks, token = task % chunks * chunk;
  const std::size_t count = call.tokens - token < chunk ? call.tokens - token : chunk;
  const std::size_t work = rotation_ != nullptr ? rotation_->scratch_floats() : 0;
  const std::size_t floats = aligned(count * form_.kv_heads * form_.format.head_size);
  const ScratchPool::Lease memory(pool, (floats + work) * sizeof(float));
  auto* const scratch = static_cast<float*>(memory.data());
  const HadamardProblem* const rotation = rotation_ != nullptr ? &rotation_->problem() : nullptr;
  store_rows(call, row, token, count, call.key, rotation, scratch, call.present_key);
  store_rows(call, row, token, count, call.value, nullptr, scratch, call.present_value);
}

void Attention::store_rows(const AttentionCall& call, std::size_t row, std::size_t token, std::size_t count,
                           const void* from, const HadamardProblem* rotation, float* scratch,
                           std::uint8_t* present) const {
  const std::size_t size = form_.format.head_size, heads = form_.kv_heads, width = heads * size;
  const auto* const first =
      static_cast<const unsigned char*>(from) + (row * call.tokens + token) * width * element_bytes_;
  cache_.load[element_](first, scratch, count * width);
  if (rotation != nullptr) {
    rotate_(*rotation, scratch, scratch, count * width / rotation->size, scratch + aligned(count * width));
  }
  const std::size_t slot = start_of(call, row) + token;
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t head = 0; head < heads; ++head) {
      cache_.store(form_.format, scratch + (i * heads + head) * size,
                   present + ((row * heads + head) * call.slots + slot + i) * row_bytes_);
    }
  }
}

Attention::Cut Attention::cut_queries(const AttentionCall& call) const {
  Cut cut{};
  cut.rows = call.tokens * group_;
  if (cut.rows <= kFewQueries) {
    cut.tile_rows = cut.rows;
    cut.runs = kRuns;
  } else {
    const std::size_t least = divide_up(cut.rows, kMostQueries);
    cut.tile_rows = divide_up(divide_up(cut.rows, least < 2 ? 2 : least), kTileStep) * kTileStep;
    cut.runs = 1;
  }
  cut.tiles = divide_up(cut.rows, cut.tile_rows);
  return cut;
}

Attention::Tile Attention::tile_of(const Cut& cut, std::size_t task) const {
  Tile tile{};
  tile.first = task % cut.tiles * cut.tile_rows;
  tile.count = cut.rows - tile.first < cut.tile_rows ? cut.rows - tile.first : cut.tile_rows;
  tile.head = task / cut.tiles % form_.kv_heads;
  tile.row = task / cut.tiles / form_.kv_heads;
  return tile;
}

// Of one run: the largest score and the total of every query, then their sums.
std::size_t Attention::partial_floats(const Cut& cut) const {
  return aligned(2 * cut.tile_rows) + aligned(cut.tile_rows * form_.format.head_size);
}

Attention::Slots Attention::visible(const AttentionCall& call, std::size_t row, std::size_t token) const {
  const std::size_t start = start_of(call, row), own = start + token;
  Slots slots{0, form_.causal ? own + 1 : start + call.tokens};
  if (form_.window >= 0 && own + 1 > static_cast<std::size_t>(form_.window)) {
    slots.first = own + 1 - static_cast<std::size_t>(form_.window);
  }
  return slots;
}

void* Attention::output_of(const AttentionCall& call, const Tile& tile, std::size_t query) const {
  const std::size_t token = query / group_, head = tile.head * group_ + query % group_;
  const std::size_t place = (tile.row * call.tokens + token) * form_.heads + head;
  return static_cast<unsigned char*>(call.output) + place * form_.format.head_size * element_bytes_;
}

void Attention::attend(const AttentionCall& call, const Cut& cut, std::size_t task, float* partials,
                       ScratchPool& pool) const {
  const std::size_t run = partials != nullptr ? task % cut.runs : 0;
  const Tile tile = tile_of(cut, partials != nullptr ? task / cut.runs : task);
  const std::size_t size = form_.format.head_size, work = problem_.scratch.bytes;
  const std::size_t rotating = rotation_ != nullptr ? rotation_->scratch_floats() : 0;
  const std::size_t own = partial_floats(cut), queries = aligned(tile.count * size);
  const ScratchPool::Lease memory(pool, (own + queries + aligned(rotating)) * sizeof(float) + work);
  auto* const floats = static_cast<float*>(memory.data());
  float* const result = partials != nullptr ? partials + task * own : floats;
  float* const query = floats + own;
  float* const scratch = query + queries;

  AttendQuery each[kMostQueries];
  Slots all{call.slots, 0};
  for (std::size_t q = 0; q < tile.count; ++q) {
    const std::size_t token = (tile.first + q) / group_, head = tile.head * group_ + (tile.first + q) % group_;
    const std::size_t place = (tile.row * call.tokens + token) * form_.heads + head;
    cache_.load[element_](static_cast<const unsigned char*>(call.query) + place * size * element_bytes_,
                          query + q * size, size);
    const Slots slots = visible(call, tile.row, token);
    all.first = slots.first < all.first ? slots.first : all.first;
    all.last = slots.last > all.last ? slots.last : all.last;
    const AttentionMask& mask = call.mask;
    const float* const added = mask.data == nullptr
                                   ? nullptr
                                   : mask.data + tile.row * mask.by_row + head * mask.by_head + token * mask.by_query;
    each[q] = {query + q * size, added, slots.first, slots.last};
  }
  if (rotation_ != nullptr) {
    rotate_(rotation_->problem(), query, query, tile.count * size / rotation_->problem().size, scratch);
  }
  std::size_t first = all.first / kBlockSlots, last = divide_up(all.last, kBlockSlots);
  if (partials != nullptr) {  // this run of the blocks; runs can be empty
    const std::size_t blocks = last - first, most = blocks / kLeastBlocks;
    const std::size_t runs = most < 1 ? 1 : (most < cut.runs ? most : cut.runs);
    const std::size_t from = run < runs ? run : runs, to = run < runs ? run + 1 : runs;
    last = first + blocks * to / runs;
    first += blocks * from / runs;
  }
  const std::size_t head = (tile.row * form_.kv_heads + tile.head) * call.slots * row_bytes_;
  AttendTask part{};
  part.keys = call.present_key + head;
  part.values = call.present_value + head;
  part.first = first * kBlockSlots;
  part.last = last * kBlockSlots < all.last ? last * kBlockSlots : all.last;
  // What comes after this run, or the first slots of the next head.
  const std::size_t all_bytes = call.batch * form_.kv_heads * call.slots * row_bytes_;
  const std::size_t next = head + (part.last < all.last ? part.last : call.slots) * row_bytes_;
  if (next < all_bytes) {
    part.next_keys = call.present_key + next;
    part.next_values = call.present_value + next;
    part.next_bytes = all_bytes - next < kBlockSlots * row_bytes_ ? all_bytes - next : kBlockSlots * row_bytes_;
  }
  part.queries = each;
  part.count = tile.count;
  part.largest = result;
  part.total = result + cut.tile_rows;
  part.sums = result + aligned(2 * cut.tile_rows);
  attend_(problem_, part, scratch + aligned(rotating));
  if (partials != nullptr) return;
  for (std::size_t q = 0; q < tile.count; ++q) {
    finish(part.total[q], part.sums + q * size, output_of(call, tile, tile.first + q));
  }
}

// The runs of one tile, in their order: into the first.
void Attention::merge(const AttentionCall& call, const Cut& cut, std::size_t task, float* partials) const {
  const Tile tile = tile_of(cut, task);
  const std::size_t size = form_.format.head_size, own = partial_floats(cut), sums = aligned(2 * cut.tile_rows);
  float* const runs = partials + task * cut.runs * own;
  for (std::size_t q = 0; q < tile.count; ++q) {
    float largest = runs[q];
    for (std::size_t run = 1; run < cut.runs; ++run)
      largest = runs[run * own + q] > largest ? runs[run * own + q] : largest;
    float total = 0.0f;
    float* const to = runs + sums + q * size;
    for (std::size_t run = 0; run < cut.runs; ++run) {
      const float* const part = runs + run * own;
      const float factor = part[q] == largest ? 1.0f : std::exp(part[q] - largest);
      total += factor * part[cut.tile_rows + q];
      const float* const from = part + sums + q * size;
      for (std::size_t i = 0; i < size; ++i) to[i] = (run == 0 ? 0.0f : to[i]) + factor * from[i];
    }
    finish(total, to, output_of(call, tile, tile.first + q));
  }
}

void Attention::finish(float total, float* sums, void* output) const {
  const std::size_t size = form_.format.head_size;
  for (std::size_t i = 0; i < size; ++i) sums[i] = total == 0.0f ? 0.0f : sums[i] / total;
  cache_.save[element_](sums, output, size);
}

}  // namespace graphrot
