// Attention of a few queries over the cache of one KV head, block by block: scores, a running softmax, weighted values.
// The cache is read once for all of the queries, and working memory does not depend on how long it is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cache.h"
#include "common/isa.h"

namespace graphrot {

inline constexpr std::size_t kBlockSlots = 256;  // blocks begin at multiples of it, whatever is looked at
inline constexpr std::size_t kMostQueries = 64;  // of one task
inline constexpr float kHidden = -1e30f;         // a mask at or below it hides the slot

struct AttendProblem {
  CacheFormat format;
  float score_scale;
  float softcap;  // 0: none
};

// One position of one query head.
struct AttendQuery {
  const float* query;       // head_size floats, rotated like the keys
  const float* mask;        // by slot, added to scores; null: none
  std::size_t first, last;  // the slots it sees, where the mask does not hide them
};

struct AttendTask {
  const std::uint8_t* keys;  // the row of slot 0; rows follow one another
  const std::uint8_t* values;
  std::size_t first, last;  // the slots that are looked at, `first` a multiple of kBlockSlots
  const AttendQuery* queries;
  std::size_t count;  // of queries, at most kMostQueries
  // Results: the largest score that was seen (-infinity: none), the sum of weights exp(score - largest), and the
  // weighted sum of values, [count][head_size].
  float* largest;
  float* total;
  float* sums;
};

// `scratch` holds attend_scratch_bytes(), aligned to 64 bytes.
using AttendRun = void (*)(const AttendProblem& problem, const AttendTask& task, void* scratch);

void attend_scalar(const AttendProblem& problem, const AttendTask& task, void* scratch);

AttendRun attend_kernel(const CacheFormat& format, Isa isa);
std::size_t attend_scratch_bytes(const CacheFormat& format, std::size_t queries);

}  // namespace graphrot
