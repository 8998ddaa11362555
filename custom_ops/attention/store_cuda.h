// What store_cuda.cu is told.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attend_cuda.h"
#include "hadamard/cuda.h"

namespace graphrot::cuda {

struct StoreShape {
  AttendShape attend;
  const void *query, *key, *value;
  std::uint8_t *present_key, *present_value;
  CudaHadamard rotation;
  bool rotated;
  unsigned width;  // lanes of a vector
  unsigned query_warps, key_warps;
  float unit, sign;  // of scores, for a query whose largest number is one
};

// New rows of keys and values into the cache, queries into shape.attend.queries and units.
void store_vectors(const StoreShape& store, int bits, CudaStream stream);

// What is kept of the past, then zeros: `heads` pieces of memory of so many words.
void carry_rows(const std::uint8_t* past, std::uint8_t* present, std::size_t heads, std::size_t kept_words,
                std::size_t words, CudaStream stream);

}  // namespace graphrot::cuda
