// Up to an octet of queries a block over a long cache, as in decoding: what counts is the bandwidth of the cache. Every
// warp of a block has tiles of its own and waits for no other: while it works on one tile the next is on its way, some
// 9 KiB a warp and 100 KiB a multiprocessor, several times what it takes to cover the latency of an H200's memory.
// A tile of 64 4-bit slots of 128 channels takes about 1000 instructions: 4 cycles a slot and multiprocessor, where its
// 136 bytes take 7 to 13 (H200 to A100).
#include "attention/attend_cuda.cuh"
#include "common/cuda/launch.h"

namespace graphrot::cuda {
namespace {

// Floats between the sums of two queries.
constexpr unsigned kSumGap = 8;

std::size_t merge_bytes(std::size_t channels) {
  return (kFewWarps * kOctet * (channels + kSumGap) + 2 * kFewWarps * kOctet) * sizeof(float);
}

template <int Bits, int Channels>
GRAPHROT_KERNEL(kFewThreads, kFewBlocks<Channels>) attend_few_kernel(const AttendShape shape) {
  constexpr int kSlots = kFewSlots<Bits, Channels>;
  using Work = Panel<Bits, Channels, 1, kSlots>;
  const Place place = place_of_block(shape, blockIdx.x);
  if (place.run >= place.runs) return;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, i = lane % 4, query = lane / 4;
  const unsigned octet = (place.row * shape.kv_heads + place.head) * shape.octets + place.first / kOctet;
  Work work;
  const unsigned tile_words = 4 * shape.tile_pieces;
  const auto queries = shared_array<unsigned>(kFewWarps * 4 * tile_words * 4, Work::kQueryWords);  // of all warps
  if (warp == 0) Work::fetch(shape.queries + static_cast<std::size_t>(octet) * Work::kSteps * kWarp, queries);
  __syncthreads();
  work.begin(queries, shape.units + static_cast<std::size_t>(octet) * kOctet);
  const Sight sight[1] = {sight_of_query(shape, place, query)};

  const CacheHead keys(shape.keys, shape, place), values(shape.values, shape, place);
  const auto own = shared_array<unsigned>(warp * 4 * tile_words * 4, 4 * tile_words);  // two stages of keys and values
  const auto load = [&](int tile, unsigned stage) {
    const auto to = own.part(2 * stage * tile_words, 2 * tile_words);
    keys.copy<kWarp>(shape, shape.keys, tile, place.last, to.part(0, tile_words), lane);
    values.copy<kWarp>(shape, shape.values, tile, place.last, to.part(tile_words, tile_words), lane);
    cp_async_commit();
  };
  const int first = place.from + static_cast<int>(warp);
  if (first < place.to) load(first, 0);
  unsigned stage = 0;
  for (int tile = first; tile < place.to; tile += static_cast<int>(kFewWarps), stage ^= 1) {
    cp_async_wait<0>();
    __syncwarp();  // the tile is there for all lanes, and none reads the other stage any more
    if (tile + static_cast<int>(kFewWarps) < place.to) load(tile + static_cast<int>(kFewWarps), stage ^ 1);
    const TileRows key_rows{own.part(2 * stage * tile_words, tile_words), keys.skip, shape.row_words, shape.code_words};
    const TileRows value_rows{own.part((2 * stage + 1) * tile_words, tile_words), values.skip, shape.row_words,
                              shape.code_words};
    work.attend(key_rows, value_rows, sight, tile * kSlots, shape.cap, shape.scaled);
  }
  work.end();

  // The warps' results become one. Tiles are no longer wanted.
  __syncthreads();
  constexpr unsigned kStride = Channels + kSumGap, kSums = kFewWarps * kOctet * kStride;
  const auto sums = shared_array<float>(0, kSums);
  const auto tops = shared_array<float>(kSums * 4, kFewWarps * kOctet);
  const auto totals = shared_array<float>((kSums + kFewWarps * kOctet) * 4, kFewWarps * kOctet);
  const float top = work.top(0, shape.scaled);
  if (i == 0) tops[warp * kOctet + query] = top;
  __syncthreads();
  float most = minus_infinity();
  GRAPHROT_UNROLL
  for (unsigned w = 0; w < kFewWarps; ++w) most = fmaxf(most, tops[w * kOctet + query]);
  const float share = top == most ? 1.0f : power_of_two(top - most);
  if (i == 0) totals[warp * kOctet + query] = work.total[0] * share;
  GRAPHROT_UNROLL
  for (unsigned part = 0; part < Work::kChannelParts; ++part) {
    float x[8];
    work.channels(0, part, x);
    const unsigned at = (warp * kOctet + query) * kStride + 8 * (4 * part + i);
    GRAPHROT_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      sums.vector<float4>(at + 4 * half) =
          make_float4(x[4 * half] * share, x[4 * half + 1] * share, x[4 * half + 2] * share, x[4 * half + 3] * share);
    }
  }
  __syncthreads();
  for (unsigned item = threadIdx.x; item < Channels; item += kFewThreads) {  // eight channels of one of eight queries
    const unsigned row = item / (Channels / 8), at = item % (Channels / 8) * 8;
    unsigned channel;
    if (row >= place.count || !channel_of<Bits>(shape, at, channel)) continue;
    float x[8] = {}, total = 0.0f, highest = minus_infinity();
    GRAPHROT_UNROLL
    for (unsigned w = 0; w < kFewWarps; ++w) {
      const unsigned from = (w * kOctet + row) * kStride + at;
      const float4 a = sums.vector<float4>(from), b = sums.vector<float4>(from + 4);
      x[0] += a.x, x[1] += a.y, x[2] += a.z, x[3] += a.w, x[4] += b.x, x[5] += b.y, x[6] += b.z, x[7] += b.w;
      total += totals[w * kOctet + row];
      highest = fmaxf(highest, tops[w * kOctet + row]);
    }
    put_channels(shape, place, row, channel, total, x);
    if (at == 0) put_total(shape, place, row, highest, total);
  }
}

template <int Bits>
void launch_few(const AttendShape& shape, CudaStream stream) {
  const dim3 grid(shape.tasks * shape.tiles * shape.runs), block(kFewThreads);
  const std::size_t bytes = few_shared_bytes(shape);
  switch (padded_channels(shape.head_size)) {
    case 64: return launch(&attend_few_kernel<Bits, 64>, grid, block, bytes, stream, shape);
    case 128: return launch(&attend_few_kernel<Bits, 128>, grid, block, bytes, stream, shape);
    default: return launch(&attend_few_kernel<Bits, 256>, grid, block, bytes, stream, shape);
  }
}

}  // namespace

std::size_t few_shared_bytes(const AttendShape& shape) {
  const std::size_t channels = padded_channels(shape.head_size);
  const std::size_t tiles = std::size_t{kFewWarps} * 4 * shape.tile_pieces * 16 + channels * 16;
  const std::size_t merging = merge_bytes(channels);
  return tiles > merging ? tiles : merging;
}

void attend_few(const AttendShape& shape, int bits, CudaStream stream) {
  return bits == 4 ? launch_few<4>(shape, stream) : launch_few<8>(shape, stream);
}

}  // namespace graphrot::cuda
