// The whole operator without a runtime: new rows go into the cache, then every query attends to what is stored there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "attention/attend.h"
#include "attention/cache.h"
#include "common/element.h"
#include "common/isa.h"
#include "common/scratch.h"
#include "hadamard/hadamard.h"

namespace graphrot {

struct AttentionForm {
  std::size_t heads, kv_heads;
  CacheFormat format;
  float score_scale, softcap;  // softcap 0: none
  std::int64_t window;         // slots that a query sees up to its own; -1: all
  bool causal;
};

// Added to scores: data[row * by_row + head * by_head + query * by_query + slot].
struct AttentionMask {
  const float* data;  // null: none
  std::size_t by_row, by_head, by_query, slots;
};

struct AttentionCall {
  std::size_t batch, tokens;             // new tokens of each row
  const void* query;                     // [batch, tokens, heads * head_size]
  const void* key;                       // [batch, tokens, kv_heads * head_size]
  const void* value;
  std::size_t past_slots, slots;         // slots >= past_slots
  const std::uint8_t* past_key;          // [batch, kv_heads, past_slots, row]
  const std::uint8_t* past_value;
  std::uint8_t* present_key;             // [batch, kv_heads, slots, row]; may be past_key where slots == past_slots
  std::uint8_t* present_value;
  const std::int32_t* last_slots;        // [batch]: the slots in use after the call, minus one
  AttentionMask mask;
  void* output;  // [batch, tokens, heads * head_size]
};

// Throws std::invalid_argument, in words for people, when the numbers do not fit together. `rotation_size`: 0 for none.
void check_attention_form(const AttentionForm& form, std::size_t rotation_size);

// Throws std::invalid_argument, in words for people, when the lengths and the mask do not fit the cache. Looks at no
// output.
void check_attention_call(const AttentionCall& call);
// The same for what can be said without looking at a tensor.
void check_attention_sizes(const AttentionCall& call);

class Attention {
 public:
  // `rotation` of queries and keys; null for none. Throws std::invalid_argument, in words for people, when the numbers
  // do not fit together.
  Attention(const AttentionForm& form, std::unique_ptr<HadamardTransform> rotation, Element element, Isa isa);

  const AttentionForm& form() const { return form_; }

  // `parallel(count, task)` runs task(0) ... task(count - 1), at once or not; how many threads it has changes neither
  // results nor working memory, and neither does `slots` the latter. The call is one that was checked.
  template <class Parallel>
  void run(const AttentionCall& call, ScratchPool& pool, const Parallel& parallel) const {
    if (call.past_key != call.present_key || call.past_value != call.present_value) {
      parallel(call.batch * form_.kv_heads, [&](std::size_t task) { carry_on(call, task); });
    }
    if (call.batch * call.tokens == 0) return;
    const std::size_t chunk = store_chunk(call.tokens), chunks = (call.tokens + chunk - 1) / chunk;
    parallel(call.batch * chunks, [&](std::size_t task) { store(call, chunk, task, pool); });
    const Cut cut = cut_queries(call);
    const std::size_t tasks = call.batch * form_.kv_heads * cut.tiles;
    if (cut.runs == 1) {
      parallel(tasks, [&](std::size_t task) { attend(call, cut, task, nullptr, pool); });
      return;
    }
    const ScratchPool::Lease memory(pool, tasks * cut.runs * partial_floats(cut) * sizeof(float));
    auto* const partials = static_cast<float*>(memory.data());
    parallel(tasks * cut.runs, [&](std::size_t task) { attend(call, cut, task, partials, pool); });
    for (std::size_t task = 0; task < tasks; ++task) merge(call, cut, task, partials);
  }

 private:
  // The queries of one KV head, [tokens][heads of its group], in tiles; and for few of them, the slots in runs, so that
  // there is work for several threads.
  struct Cut {
    std::size_t rows, tile_rows, tiles, runs;
  };
  struct Tile {
    std::size_t row, head, first, count;  // row of the batch, KV head, queries
  };
  struct Slots {
    std::size_t first, last;
  };

  void carry_on(const AttentionCall& call, std::size_t task) const;
  std::size_t store_chunk(std::size_t tokens) const;
  void store(const AttentionCall& call, std::size_t chunk, std::size_t task, ScratchPool& pool) const;
  void store_rows(const AttentionCall& call, std::size_t row, std::size_t token, std::size_t count, const void* from,
                  const HadamardProblem* rotation, float* scratch, std::uint8_t* present) const;
  Cut cut_queries(const AttentionCall& call) const;
  Tile tile_of(const Cut& cut, std::size_t task) const;
  std::size_t partial_floats(const Cut& cut) const;
  Slots visible(const AttentionCall& call, std::size_t row, std::size_t token) const;
  void* output_of(const AttentionCall& call, const Tile& tile, std::size_t query) const;
  void attend(const AttentionCall& call, const Cut& cut, std::size_t task, float* partials, ScratchPool& pool) const;
  void merge(const AttentionCall& call, const Cut& cut, std::size_t task, float* partials) const;
  void finish(float total, float* sums, void* output) const;

  AttentionForm form_;
  std::unique_ptr<HadamardTransform> rotation_;
  std::size_t group_, row_bytes_, element_bytes_;
  int element_;
  const CacheKernels& cache_;
  HadamardRun rotate_;
  AttendProblem problem_;
  AttendRun attend_;
};

}  // namespace graphrot
