// Kernels that attend: few queries over a long cache, many queries, and the end of both where the cache was cut in
// runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/device.cuh"
#include "common/cuda/runtime.h"
#include "common/element.h"

namespace graphrot::cuda {

inline constexpr unsigned kFewWarps = 4, kManyWarps = 4;
inline constexpr unsigned kFewThreads = 32 * kFewWarps, kManyThreads = 32 * kManyWarps;

// Padded channels that there are kernels for.
constexpr unsigned padded_channels(unsigned head_size) {
  return head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256;
}

// Slots of a tile, and octets of queries of a warp. Longer tiles mean fewer conversions of sums to floats; what limits
// them are registers (64 slots of two octets are 32 scores a lane beside 64 sums of channels and 64 of products), and
// for few queries the shared memory of stages.
template <int Bits, int Channels>
inline constexpr int kFewSlots = Bits == 4 && Channels <= 128 ? 64 : 32;
inline constexpr int kManySlots = 64;
template <int Channels>
inline constexpr int kManyOctets = Channels > 128 ? 1 : 2;
// Blocks that fit a multiprocessor, by registers.
template <int Channels>
inline constexpr int kFewBlocks = Channels > 128 ? 2 : Channels > 64 ? 3 : 4;
template <int Channels>
inline constexpr int kManyBlocks = Channels > 64 ? 2 : 3;

struct AttendShape {
  unsigned head_size, row_words, code_words;  // of a row of the cache, in words of four bytes
  unsigned heads, kv_heads, group, tokens;
  unsigned tasks;                    // rows of the batch by KV heads
  unsigned rows;                     // queries of a task: [tokens][group]
  unsigned tiles, tile_rows;         // of queries; the last one may be short
  unsigned octets;                   // of a task, those of whole tiles
  unsigned runs, least_tiles;        // runs that slots are cut into at most; tiles of slots of each at least
  unsigned tile_slots, tile_pieces;  // of slots, and the 16-byte pieces of one in shared memory
  unsigned slots;
  int window;                        // -1: all
  bool causal;
  bool scaled;                       // there is a cap or a mask
  float cap;                         // by log2(e); 0: none
  const float* mask;
  std::size_t mask_by_row, mask_by_head, mask_by_query;
  int mask_slots;
  const std::uint8_t* keys;
  const std::uint8_t* values;
  std::size_t cache_bytes;           // of each
  const std::int32_t* last_slots;
  // Of each octet: the fragments of every product, then each query's unit and the sum of its numbers.
  uint4* queries;
  float2* units;
  // Of each task, tile and run, for every query: sums of channels, the largest score with the total. Where runs > 1.
  float* sums;
  float2* totals;
  void* output;
  Element element;
};

// Bits and channels choose the kernel; shared bytes are what launch() is told.
std::size_t few_shared_bytes(const AttendShape& shape);
std::size_t many_shared_bytes(const AttendShape& shape);
void attend_few(const AttendShape& shape, int bits, CudaStream stream);
void attend_many(const AttendShape& shape, int bits, CudaStream stream);
void combine_runs(const AttendShape& shape, CudaStream stream);

}  // namespace graphrot::cuda
