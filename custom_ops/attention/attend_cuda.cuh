// What the kernels that attend have in common: which queries and slots a block has, tiles of the cache on their way to
// shared memory, and results. Grids come from capacities, lengths from the device: a captured graph stays right while
// they grow.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attend_cuda.h"
#include "attention/panel_cuda.cuh"
#include "common/cuda/device.cuh"
#include "common/cuda/element.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/shared.cuh"

namespace graphrot::cuda {

// The slot of a row's first new token. Lengths that do not fit the cache are cut.
GRAPHROT_DEVICE int start_of(const std::int32_t* last_slots, unsigned row, int tokens, int slots) {
  const int last = last_slots[row], used = (last < -1 ? -1 : last >= slots ? slots - 1 : last) + 1;
  return used > tokens ? used - tokens : 0;
}

// What the queries of a token see of the slots, without a mask.
GRAPHROT_DEVICE Sight sight_of(const AttendShape& shape, int start, int token) {
  const int own = start + token;
  Sight sight{0, shape.causal ? own + 1 : start + static_cast<int>(shape.tokens), nullptr};
  if (shape.window >= 0 && own + 1 > shape.window) sight.first = own + 1 - shape.window;
  if (shape.mask != nullptr && sight.last > shape.mask_slots) sight.last = shape.mask_slots;
  return sight;
}

// The queries [first, first + count) of one KV head of one row, [tokens][heads of its group], and this block's run of
// the tiles of slots that they see.
struct Place {
  unsigned row, head, first, count;
  unsigned run, runs;  // runs that have something to do
  unsigned part;       // where a run's results stand
  int start;           // slot of the first new token
  int from, to;        // tiles
  int last;            // slots that are seen end here
};

GRAPHROT_DEVICE Place place_of(const AttendShape& shape, unsigned task, unsigned tile, unsigned run) {
  Place place;
  place.row = task / shape.kv_heads;
  place.head = task % shape.kv_heads;
  place.first = tile * shape.tile_rows;
  place.count = shape.rows - place.first < shape.tile_rows ? shape.rows - place.first : shape.tile_rows;
  place.start = start_of(shape.last_slots, place.row, static_cast<int>(shape.tokens), static_cast<int>(shape.slots));
  const int slots = static_cast<int>(shape.tile_slots);
  const Sight low = sight_of(shape, place.start, static_cast<int>(place.first / shape.group));
  const Sight high = sight_of(shape, place.start, static_cast<int>((place.first + place.count - 1) / shape.group));
  place.last = high.last;
  const int first = low.first / slots, end = high.last > low.first ? (high.last + slots - 1) / slots : first;
  const int tiles = end - first, most = tiles / static_cast<int>(shape.least_tiles);
  place.run = run;
  place.runs = most < 1 ? 1 : (most < static_cast<int>(shape.runs) ? static_cast<unsigned>(most) : shape.runs);
  place.part = (task * shape.tiles + tile) * shape.runs + run;
  place.from = first + static_cast<int>(static_cast<std::int64_t>(tiles) * run / place.runs);
  place.to = first + static_cast<int>(static_cast<std::int64_t>(tiles) * (run + 1) / place.runs);
  return place;
}

// Of the block: tiles of many queries see more slots the later they are, and so come first.
GRAPHROT_DEVICE Place place_of_block(const AttendShape& shape, unsigned block) {
  const unsigned run = block % shape.runs, rest = block / shape.runs;
  return place_of(shape, rest % shape.tasks, shape.tiles - 1 - rest / shape.tasks, run);
}

// What a query of the place sees; a query that is not there sees nothing.
GRAPHROT_DEVICE Sight sight_of_query(const AttendShape& shape, const Place& place, unsigned query) {
  if (query >= place.count) return {0, 0, nullptr};
  const unsigned token = (place.first + query) / shape.group;
  Sight sight = sight_of(shape, place.start, static_cast<int>(token));
  if (shape.mask != nullptr) {
    const unsigned head = place.head * shape.group + (place.first + query) % shape.group;
    sight.mask = shape.mask + place.row * shape.mask_by_row + head * shape.mask_by_head + token * shape.mask_by_query;
  }
  return sight;
}

// Rows of one head follow one another without a gap, so a tile is one run of bytes: it is copied in 16-byte pieces that
// lie on 16-byte addresses, whatever the length of a row, and begins up to three words into the first.
struct CacheHead {
  std::int64_t head;  // byte of slot 0's row: of keys as of values, so that both take one place in registers
  unsigned skip;      // words before it in the piece that holds it

  GRAPHROT_DEVICE CacheHead(const std::uint8_t* all, const AttendShape& shape, const Place& place) {
    head = static_cast<std::int64_t>(place.row * shape.kv_heads + place.head) * shape.slots * shape.row_words * 4;
    skip = static_cast<unsigned>((reinterpret_cast<std::uintptr_t>(all) + head) % 16) / 4;
  }

  // Slots [tile * tile_slots, last) of `memory`, all of the cache. What lies behind is zeros: it is read, since all tiles
  // are whole.
  template <unsigned Threads>
  GRAPHROT_DEVICE void copy(const AttendShape& shape, const std::uint8_t* memory, int tile, int last,
                            Shared<unsigned> to, unsigned thread) const {
    const auto bytes = static_cast<std::int64_t>(shape.cache_bytes);
    const std::int64_t row = 4 * static_cast<std::int64_t>(shape.row_words);
    const std::int64_t from = head - 4 * skip + std::int64_t{tile} * shape.tile_slots * row, end = head + last * row;
    if ((tile + 1) * static_cast<int>(shape.tile_slots) <= last && from >= 0 &&
        from + 16 * static_cast<std::int64_t>(shape.tile_pieces) <= bytes) {  // nearly always
      const std::uint8_t* source = memory + from + 16 * thread;
      for (unsigned piece = thread; piece < shape.tile_pieces; piece += Threads, source += 16 * Threads) {
        cp_async16(to.at(4 * piece), source, true);
      }
      return;
    }
    GRAPHROT_NO_UNROLL
    for (unsigned piece = thread; piece < shape.tile_pieces; piece += Threads) {
      const std::int64_t at = from + 16 * static_cast<std::int64_t>(piece);
      if (at < end && (at < 0 || at + 16 > bytes)) {  // not all of it is ours to read
        GRAPHROT_NO_UNROLL
        for (unsigned k = 0; k < 4; ++k) {
          const std::int64_t word = at + 4 * k;
          const bool inside = word >= 0 && word < bytes;
          to[4 * piece + k] = inside ? *reinterpret_cast<const unsigned*>(memory + word) : 0u;
        }
      } else {
        cp_async16(to.at(4 * piece), memory + at, at < end);  // where not read, the address must be aligned, too
      }
    }
  }
};

// Eight values that follow one another.
GRAPHROT_DEVICE void put_elements(void* to, std::size_t at, Element element, const float (&x)[8]) {
  if (element == Element::kHalf) {
    store16(static_cast<Half*>(to) + at, pack<Half>(x));
  } else if (element == Element::kBFloat16) {
    store16(static_cast<BFloat16*>(to) + at, pack<BFloat16>(x));
  } else {
    GRAPHROT_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      const float four[4] = {x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]};
      store16(static_cast<float*>(to) + at + 4 * half, pack<float>(four));
    }
  }
}

// Where eight channels of a padded place stand in a row; false where they are padding.
template <int Bits>
GRAPHROT_DEVICE bool channel_of(const AttendShape& shape, unsigned place, unsigned& channel) {
  if constexpr (Bits == 4) {
    const unsigned half = place / 32 % 2, own = place / 64 * 32 + place % 32;
    channel = own + half * (shape.head_size / 2);
    return own < shape.head_size / 2;
  } else {
    channel = place;
    return place < shape.head_size;
  }
}

// Eight channels of a query: the result where there is one run, else what the runs are combined from.
GRAPHROT_DEVICE void put_channels(const AttendShape& shape, const Place& place, unsigned query, unsigned channel,
                                  float total, float (&x)[8]) {
  if (shape.runs > 1) {
    const std::size_t row = place.part * static_cast<std::size_t>(shape.tile_rows) + query;
    put_elements(shape.sums, row * shape.head_size + channel, Element::kFloat, x);
    return;
  }
  GRAPHROT_UNROLL
  for (unsigned k = 0; k < 8; ++k) x[k] = total == 0.0f ? 0.0f : __fdividef(x[k], total);
  const unsigned token = (place.first + query) / shape.group;
  const unsigned head = place.head * shape.group + (place.first + query) % shape.group;
  const std::size_t row = (static_cast<std::size_t>(place.row) * shape.tokens + token) * shape.heads + head;
  put_elements(shape.output, row * shape.head_size + channel, shape.element, x);
}

GRAPHROT_DEVICE void put_total(const AttendShape& shape, const Place& place, unsigned query, float top, float total) {
  if (shape.runs > 1) {
    shape.totals[place.part * static_cast<std::size_t>(shape.tile_rows) + query] = make_float2(top, total);
  }
}

}  // namespace graphrot::cuda
