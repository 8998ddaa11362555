// Many queries, as in reading a prompt: the warps of a block have queries of their own and share the tiles of the
// cache. One barrier a tile: behind it the tile is there for all, and the stage of the tile before is free for the one
// to come, which arrives during the work. A warp has 16 queries (8 of 256 channels), so that what is unpacked serves
// two products: per tile of 64 slots and 128 channels 128 products, for which a quarter of an A100's
// multiprocessor takes 1024 cycles, beside some 1100 other instructions.
#include "attention/attend_cuda.cuh"
#include "common/cuda/launch.h"

namespace graphrot::cuda {
namespace {

template <int Bits, int Channels>
GRAPHROT_KERNEL(kManyThreads, kManyBlocks<Channels>) attend_many_kernel(const AttendShape shape) {
  constexpr int kSlots = kManySlots, kOctets = kManyOctets<Channels>;
  using Work = Panel<Bits, Channels, kOctets, kSlots>;
  const Place place = place_of_block(shape, blockIdx.x);
  if (place.run >= place.runs) return;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, i = lane % 4;
  const unsigned first = warp * kOctets * kOctet + lane / 4;  // of the lane's queries, one in each octet
  const unsigned task = place.row * shape.kv_heads + place.head;
  const unsigned octet = task * shape.octets + place.first / kOctet + warp * kOctets;
  Work work;
  const unsigned tile_words = 4 * shape.tile_pieces;
  const auto queries = shared_array<unsigned>((4 * tile_words + warp * Work::kQueryWords) * 4, Work::kQueryWords);
  Work::fetch(shape.queries + static_cast<std::size_t>(octet) * Work::kSteps * kWarp, queries);
  work.begin(queries, shape.units + static_cast<std::size_t>(octet) * kOctet);
  Sight sight[kOctets];
  GRAPHROT_UNROLL
  for (unsigned o = 0; o < kOctets; ++o) sight[o] = sight_of_query(shape, place, first + o * kOctet);

  const CacheHead keys(shape.keys, shape, place), values(shape.values, shape, place);
  const auto tiles = shared_array<unsigned>(0, 4 * tile_words);  // two stages of keys and values
  const auto load = [&](int tile, unsigned stage) {
    const auto to = tiles.part(2 * stage * tile_words, 2 * tile_words);
    keys.copy<kManyThreads>(shape, shape.keys, tile, place.last, to.part(0, tile_words), threadIdx.x);
    values.copy<kManyThreads>(shape, shape.values, tile, place.last, to.part(tile_words, tile_words), threadIdx.x);
    cp_async_commit();
  };
  if (place.from < place.to) load(place.from, 0);
  unsigned stage = 0;
  for (int tile = place.from; tile < place.to; ++tile, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (tile + 1 < place.to) load(tile + 1, stage ^ 1);
    const TileRows key_rows{tiles.part(2 * stage * tile_words, tile_words), keys.skip, shape.row_words,
                            shape.code_words};
    const TileRows value_rows{tiles.part((2 * stage + 1) * tile_words, tile_words), values.skip, shape.row_words,
                              shape.code_words};
    work.attend(key_rows, value_rows, sight, tile * kSlots, shape.cap, shape.scaled);
  }
  work.end();
  // Worked out again: there are no registers in which it could wait.
  const Place done = place_of_block(shape, anew(blockIdx.x));
  GRAPHROT_UNROLL
  for (unsigned o = 0; o < kOctets; ++o) {
    const unsigned query = first + o * kOctet;
    if (query >= done.count) continue;
    if (i == 0) put_total(shape, done, query, work.top(o, shape.scaled), work.total[o]);
    GRAPHROT_UNROLL
    for (unsigned part = 0; part < Work::kChannelParts; ++part) {
      unsigned channel;
      if (!channel_of<Bits>(shape, 8 * (4 * part + i), channel)) continue;
      float x[8];
      work.channels(o, part, x);
      put_channels(shape, done, query, channel, work.total[o], x);
    }
  }
}

template <int Bits>
void launch_many(const AttendShape& shape, CudaStream stream) {
  const dim3 grid(shape.tasks * shape.tiles * shape.runs), block(kManyThreads);
  const std::size_t bytes = many_shared_bytes(shape);
  switch (padded_channels(shape.head_size)) {
    case 64: return launch(&attend_many_kernel<Bits, 64>, grid, block, bytes, stream, shape);
    case 128: return launch(&attend_many_kernel<Bits, 128>, grid, block, bytes, stream, shape);
    default: return launch(&attend_many_kernel<Bits, 256>, grid, block, bytes, stream, shape);
  }
}

}  // namespace

std::size_t many_shared_bytes(const AttendShape& shape) {
  const std::size_t query_bytes = 2 * padded_channels(shape.head_size);
  return std::size_t{4} * shape.tile_pieces * 16 + shape.tile_rows * query_bytes;
}

void attend_many(const AttendShape& shape, int bits, CudaStream stream) {
  return bits == 4 ? launch_many<4>(shape, stream) : launch_many<8>(shape, stream);
}

}  // namespace graphrot::cuda
