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
inline constexpr std::size_t kPieceBytes = 16;   // of a row, unpacked together
inline constexpr std::size_t kTailSlots = 16;    // of the last slots, which are copied where they are no whole piece

inline constexpr std::size_t kRowNumbers = 8;    // floats that a kernel keeps of each query
inline constexpr std::size_t kScaleNumbers = 4;  // and of each slot of a block

// What the kernels need to know of a node.
struct AttendProblem {
  CacheFormat format;
  float score_scale;
  float softcap;  // 0: none
  std::size_t row_bytes, code_bytes;
  std::size_t pieces;    // of a row's codes; the last one may overlap the one before
  std::size_t channels;  // of all pieces
  struct {
    std::size_t codes, scores, queries, weights, sums, rows, scales, tail, bytes;
  } scratch;  // where its parts begin, in bytes, and how many they are together
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
  // The rows that will be wanted after these, likely by the same thread, and how many bytes of them; null: none.
  const std::uint8_t* next_keys;
  const std::uint8_t* next_values;
  std::size_t next_bytes;
  const AttendQuery* queries;
  std::size_t count;  // of queries, at most kMostQueries
  // Results: the largest score that was seen (-infinity: none), the sum of weights exp(score - largest), and the
  // weighted sum of values, [count][head_size].
  float* largest;
  float* total;
  float* sums;
};

// `scratch` holds problem.scratch.bytes, aligned to 64 bytes.
using AttendRun = void (*)(const AttendProblem& problem, const AttendTask& task, void* scratch);

void attend_scalar(const AttendProblem& problem, const AttendTask& task, void* scratch);
#if GRAPHROT_X86
// For rows of at least kPieceBytes codes of up to kWidestHead channels.
void attend_avx2(const AttendProblem& problem, const AttendTask& task, void* scratch);
void attend_avx512(const AttendProblem& problem, const AttendTask& task, void* scratch);
void attend_vnni(const AttendProblem& problem, const AttendTask& task, void* scratch);
#endif

inline constexpr std::size_t kWidestHead = 256;  // sums of its products fit 32 bits

AttendProblem attend_problem(const CacheFormat& format, float score_scale, float softcap);
AttendRun attend_kernel(const AttendProblem& problem, Isa isa);

}  // namespace graphrot
