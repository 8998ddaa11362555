// The shim itself: what CUDA promises holds, and what it leaves undefined is said in words.
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "common/cuda/element.cuh"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.cuh"
#include "common/cuda/shared.cuh"
#include "tests/check.h"
#include "tests/random.h"

using namespace graphrot;
using namespace graphrot::cuda;
using graphrot::test::Random;

namespace {

constexpr std::size_t kShared = 4096;

void run(unsigned threads, const std::function<void()>& kernel) { shim::launch(1, threads, kShared, kernel); }

// The kernel is refused, in every order of its threads, in words that hold one of these.
void refused(const std::vector<std::string>& words, unsigned threads, const std::function<void()>& kernel) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    shim::set_seed(seed);
    std::string said = "nothing";
    try {
      run(threads, kernel);
    } catch (const shim::Violation& violation) {
      said = violation.what();
    }
    bool found = false;
    for (const std::string& each : words) found = found || said.find(each) != std::string::npos;
    EXPECT(found, "'%s' was to be said, seed %d: %s", words[0].c_str(), static_cast<int>(seed), said.c_str());
  }
}

void barriers() {
  // Every thread reads its neighbour's number, again and again.
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    shim::set_seed(seed);
    run(100, [] {
      const auto numbers = shared_array<int>(0, 100);
      for (int round = 0; round < 10; ++round) {
        numbers[threadIdx.x] = static_cast<int>(threadIdx.x) * round;
        __syncthreads();
        const int next = numbers[(threadIdx.x + 1) % 100];
        EXPECT(next == static_cast<int>((threadIdx.x + 1) % 100) * round, "round %d", round);
        __syncthreads();
      }
    });
  }
  const std::string race = "with no barrier in between";
  refused({race, "never written"}, 64, [] {
    const auto numbers = shared_array<int>(0, 64);
    numbers[threadIdx.x] = 1;
    const int next = numbers[(threadIdx.x + 1) % 64];
    EXPECT(next == 1, "read");
  });
  refused({race}, 64, [] {  // the second barrier is missing
    const auto numbers = shared_array<int>(0, 64);
    for (int round = 0; round < 2; ++round) {
      numbers[threadIdx.x] = round;
      __syncthreads();
      const int next = numbers[(threadIdx.x + 1) % 64];
      EXPECT(next == round, "read");
    }
  });
  refused({race}, 64, [] { shared_array<int>(0, 1)[0] = 1; });
  refused({race, "never written"}, 64, [] {  // a barrier of each warp is too little
    const auto numbers = shared_array<int>(0, 64);
    numbers[threadIdx.x] = 1;
    __syncwarp();
    const int across = numbers[threadIdx.x ^ 32u];
    EXPECT(across == 1, "read");
  });
  run(64, [] {  // and enough inside it
    const auto numbers = shared_array<int>(0, 64);
    numbers[threadIdx.x] = 1;
    __syncwarp();
    const int beside = numbers[threadIdx.x ^ 1u];
    EXPECT(beside == 1, "read");
    __syncwarp();
    numbers[threadIdx.x ^ 2u] = 2;
  });
  refused({race, "never written"}, 32, [] {  // half a warp met
    const auto numbers = shared_array<int>(0, 32);
    numbers[threadIdx.x] = 1;
    __syncwarp(threadIdx.x < 16 ? 0xffffu : 0xffff0000u);
    const int across = numbers[threadIdx.x ^ 16u];
    EXPECT(across == 1, "read");
  });
  refused({"that other threads have left", "leaves the kernel while others wait"}, 64, [] {
    if (threadIdx.x != 5) __syncthreads();
  });
  refused({"different barriers"}, 64, [] {
    if (threadIdx.x < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  });
}

void shared_arrays() {
  run(1, [] {
    const auto bytes = shared_array<std::uint8_t>(16, 32);
    for (unsigned i = 0; i < 32; ++i) bytes[i] = static_cast<std::uint8_t>(i);
    const uint4 words = bytes.vector<uint4>(16);
    EXPECT(words.x == 0x13121110u && words.w == 0x1f1e1d1cu, "16 bytes");
    bytes.part(8, 8).vector<uint2>(0) = make_uint2(1, 2);
    const std::uint8_t low = bytes[8], high = bytes[12], after = bytes[16];
    EXPECT(low == 1 && high == 2 && after == 16, "a part");
  });
  refused({"never written"}, 1, [] {
    const float x = shared_array<float>(0, 8)[3];
    EXPECT(x == 0, "read");
  });
  refused({"element 8 of an array of 8"}, 1, [] { shared_array<float>(0, 8)[8] = 1; });
  refused({"element 6 of an array of 8"}, 1, [] { shared_array<float>(0, 8).vector<float4>(6) = float4{}; });
  refused({"not aligned"}, 1, [] { shared_array<float>(0, 8).vector<float4>(2) = float4{}; });
  refused({"not aligned, or beyond"}, 1, [] { shared_array<float>(2, 8); });
  refused({"not aligned, or beyond"}, 1, [] { shared_array<float>(kShared - 16, 5); });
  refused({"element 9 of an array of 8"}, 1, [] { shared_array<float>(0, 8).part(4, 5); });
  // What one block wrote, the next does not have.
  run(1, [] { shared_array<float>(0, 1)[0] = 1; });
  refused({"never written"}, 1, [] {
    const float x = shared_array<float>(0, 1)[0];
    EXPECT(x == 0, "read");
  });
}

void shuffles() {
  run(64, [] {
    const int lane = static_cast<int>(threadIdx.x % 32), own = static_cast<int>(threadIdx.x);
    EXPECT(__shfl_xor_sync(kAllLanes, own, 5) == (own ^ 5), "xor");
    EXPECT(__shfl_down_sync(kAllLanes, own, 3) == (lane > 28 ? own : own + 3), "down");
    EXPECT(__shfl_up_sync(kAllLanes, own, 3) == (lane < 3 ? own : own - 3), "up");
    EXPECT(__shfl_sync(kAllLanes, own, 7) == own - lane + 7, "one lane");
    EXPECT(__shfl_sync(kAllLanes, own, 1, 8) == own / 8 * 8 + 1, "one lane of eight");
    EXPECT(__shfl_xor_sync(kAllLanes, 0.5f * static_cast<float>(own), 16) == 0.5f * static_cast<float>(own ^ 16), "float");
    EXPECT(__ballot_sync(kAllLanes, lane % 3 == 0) == 0x49249249u, "ballot");
    EXPECT(__any_sync(kAllLanes, lane == 9) && !__any_sync(kAllLanes, lane == 40), "any");
    EXPECT(__all_sync(kAllLanes, lane < 32) && !__all_sync(kAllLanes, lane < 31), "all");
    if (lane < 16) EXPECT(__shfl_xor_sync(0xffffu, own, 8) == (own ^ 8), "half a warp");
  });
  run(40, [] {  // the last warp is not whole
    const unsigned mask = threadIdx.x < 32 ? kAllLanes : 0xffu;
    EXPECT(__shfl_xor_sync(mask, threadIdx.x, 4) == (threadIdx.x ^ 4u), "eight lanes");
  });
  refused({"lacks its lane"}, 32, [] { __shfl_xor_sync(0xffffu, 1, 1); });
  refused({"lanes that the block does not have"}, 40, [] { __shfl_xor_sync(kAllLanes, 1, 1); });
  refused({"takes no part"}, 32, [] {
    if (threadIdx.x < 16) __shfl_xor_sync(0xffffu, 1, 16);
  });
  refused({"no thread can go on"}, 32, [] {
    if (threadIdx.x < 16) __shfl_xor_sync(kAllLanes, 1, 1);
  });
  refused({"meet in different calls"}, 32, [] {
    if (threadIdx.x < 16) {
      __ballot_sync(kAllLanes, true);
    } else {
      __any_sync(kAllLanes, true);
    }
  });
  refused({"meet in different calls"}, 32, [] { __shfl_xor_sync(threadIdx.x < 16 ? kAllLanes : 0xffff0000u, 1, 1); });
}

void copies() {
  shim::Guarded<int> numbers(32);
  const auto copy = [&](unsigned thread, bool valid) {
    cp_async16(shared_array<int>(0, 128).at(thread * 4), numbers.data() + thread % 8 * 4, valid);
  };
  for (int i = 0; i < 32; ++i) numbers[static_cast<std::size_t>(i)] = i;
  run(32, [&] {
    const auto got = shared_array<int>(0, 128);
    copy(threadIdx.x, threadIdx.x < 8);
    cp_async_commit();
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const int first = got[(threadIdx.x * 4 + 5) % 128];
    EXPECT(first == (threadIdx.x < 7 ? static_cast<int>(threadIdx.x * 4 + 5) : threadIdx.x == 31 ? 1 : 0), "a copy");
  });
  // As late as it may: what was written to the source after the copy began, but before the wait, is what arrives.
  run(1, [&] {
    copy(0, true);
    numbers[0] = 77;
    cp_async_commit();
    cp_async_wait<0>();
    const int late = shared_array<int>(0, 128)[0];
    EXPECT(late == 77, "late");
    numbers[0] = 0;
  });
  const auto read = [](unsigned i) {
    const int x = shared_array<int>(0, 128)[i];
    EXPECT(x >= 0, "read");
  };
  refused({"copy is under way"}, 1, [&] {  // no wait
    copy(0, true);
    cp_async_commit();
    read(0);
  });
  refused({"copy is under way"}, 1, [&] {  // a wait for all but this one
    copy(0, true);
    cp_async_commit();
    cp_async_wait<1>();
    read(0);
  });
  refused({"copy is under way"}, 1, [&] {  // no commit
    copy(0, true);
    cp_async_wait<0>();
    read(0);
  });
  refused({"with no barrier in between", "copy is under way", "never written"}, 32, [&] {  // a wait, but no barrier
    copy(threadIdx.x, true);
    cp_async_commit();
    cp_async_wait<0>();
    read((threadIdx.x * 4 + 4) % 128);
  });
  refused({"with no barrier in between", "copy is under way"}, 32, [&] {  // the buffer is filled again too early
    copy(threadIdx.x, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    read((threadIdx.x * 4 + 4) % 128);
    copy(threadIdx.x, true);
    cp_async_commit();
    cp_async_wait<0>();
  });
  refused({"never waited for"}, 1, [&] { copy(0, true); });
  refused({"takes 16 bytes at 8"}, 1, [&] { cp_async16(shared_array<int>(0, 8).at(2), numbers.data(), true); });
  for (const bool valid : {true, false}) {  // an address that is not read is still one
    refused({"not aligned"}, 1,
            [&] { cp_async16(shared_array<int>(0, 8).at(0), numbers.data() + 1, valid); });
  }
  refused({"takes 16 bytes at 32"}, 1, [&] { cp_async16(shared_array<int>(0, 8).at(8), numbers.data(), true); });
  refused({"copies 16 bytes of global memory at 128 of a buffer of 128"}, 1,
          [&] { cp_async16(shared_array<int>(0, 8).at(0), numbers.data() + 32, true); });
}

void global_memory() {
  shim::Guarded<float> numbers(std::vector<float>{1, 2, 3, 4, 5, 6});
  run(1, [&] {
    const uint4 v = load16(numbers.data());
    EXPECT(__uint_as_float(v.y) == 2, "16 bytes");
    store16(numbers.data(), make_uint4(0, 0, 0, __float_as_uint(9)));
    EXPECT(numbers[3] == 9 && numbers[4] == 5, "16 bytes");
  });
  refused({"loads 16 bytes of global memory at 16 of a buffer of 24"}, 1, [&] { load16(numbers.data() + 4); });
  refused({"that are not aligned"}, 1, [&] { load16(numbers.data() + 1); });
  refused({"stores 16 bytes of global memory at -16"}, 1, [&] { store16(numbers.data() - 4, uint4{}); });
  EXPECT(numbers.kept(), "nothing beside the buffer");
  numbers.data()[6] = 0;
  EXPECT(!numbers.kept(), "a number after the buffer");
  shim::Guarded<std::int8_t> bytes(5);
  bytes.data()[-1] = 0;
  EXPECT(!bytes.kept(), "a byte before the buffer");
}

// Fragments by the PTX manual's own formulas, against plain sums.
void products() {
  Random random(3);
  int a[16][32], b[32][8], c[16][8];
  for (const bool extreme : {false, true}) {
    for (const bool b_signed : {false, true}) {
      for (auto& row : a) {
        for (int& value : row) value = extreme ? -128 : static_cast<int>(random.below(256)) - 128;
      }
      for (auto& row : b) {
        for (int& value : row) {
          const int low = b_signed ? -128 : 0, worst = b_signed ? -128 : 255;
          value = extreme ? worst : static_cast<int>(random.below(256)) + low;
        }
      }
      for (auto& row : c) {
        for (int& value : row) value = static_cast<int>(random.below(1000)) - 500;
      }
      run(32, [&] {
        const unsigned group = threadIdx.x >> 2, in_group = threadIdx.x & 3u;
        unsigned fa[4] = {}, fb[2] = {};
        int d[4];
        for (unsigned i = 0; i < 16; ++i) {
          const unsigned row = (i < 4 || (i >= 8 && i < 12)) ? group : group + 8;
          const unsigned column = in_group * 4 + (i & 3u) + (i >= 8 ? 16 : 0);
          fa[i / 4] |= (static_cast<unsigned>(a[row][column]) & 0xffu) << 8 * (i & 3u);
          if (i >= 8) continue;
          const unsigned below = in_group * 4 + (i & 3u) + (i >= 4 ? 16 : 0);
          fb[i / 4] |= (static_cast<unsigned>(b[below][group]) & 0xffu) << 8 * (i & 3u);
        }
        for (unsigned i = 0; i < 4; ++i) d[i] = c[i < 2 ? group : group + 8][in_group * 2 + (i & 1u)];
        if (b_signed) {
          mma_m16n8k32_signed(d, fa, fb);
        } else {
          mma_m16n8k32(d, fa, fb);
        }
        for (unsigned i = 0; i < 4; ++i) {
          const unsigned row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1u);
          int sum = c[row][column];
          for (unsigned k = 0; k < 32; ++k) sum += a[row][k] * b[k][column];
          EXPECT(d[i] == sum, "row %u, column %u: %d, not %d", row, column, d[i], sum);
        }
      });
    }
  }
  EXPECT(dot4_u8s8(0xff01ff80u, static_cast<int>(0x80ff7f80u), 5) == 255 * -128 - 1 + 255 * 127 + 128 * -128 + 5, "dot4");
  refused({"no thread can go on"}, 32, [] {
    unsigned fa[4] = {}, fb[2] = {};
    int d[4] = {};
    if (threadIdx.x != 9) mma_m16n8k32(d, fa, fb);
  });
}

template <class T>
void products_of_halves() {
  Random random(4);
  float a[16][16], b[16][8];
  for (auto& row : a) {
    for (float& value : row) value = widen(narrow<T>(static_cast<float>(random.next())));
  }
  for (auto& row : b) {
    for (float& value : row) value = widen(narrow<T>(static_cast<float>(random.next())));
  }
  run(32, [&] {
    const unsigned group = threadIdx.x >> 2, in_group = threadIdx.x & 3u;
    unsigned fa[4], fb[2];
    float d[4] = {1, 1, 1, 1};
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = (i == 0 || i == 2) ? group : group + 8, column = in_group * 2 + (i >= 2 ? 8 : 0);
      fa[i] = narrow_pair(a[row][column], a[row][column + 1], T{});
      if (i < 2) fb[i] = narrow_pair(b[in_group * 2 + 8 * i][group], b[in_group * 2 + 8 * i + 1][group], T{});
    }
    mma_m16n8k16(d, fa, fb, T{});
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1u);
      double sum = 1;
      for (unsigned k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
      EXPECT(d[i] == static_cast<float>(sum), "row %u, column %u: %g, not %g", row, column, d[i], sum);
    }
  });
}

void matrices() {
  run(32, [] {
    const auto numbers = shared_array<std::uint16_t>(0, 4 * 8 * 8);
    for (unsigned i = threadIdx.x; i < 256; i += 32) numbers[i] = static_cast<std::uint16_t>(i);
    __syncthreads();
    unsigned rows[4], columns[4];
    load_matrices(rows, numbers.at(threadIdx.x * 8));
    load_matrices_transposed(columns, numbers.at(threadIdx.x * 8));
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = threadIdx.x / 4, pair = threadIdx.x % 4 * 2;
      EXPECT(rows[i] == (i * 64 + row * 8 + pair) * 0x10001u + 0x10000u, "matrix %u", i);
      EXPECT(columns[i] == (i * 64 + pair * 8 + row) * 0x10001u + 0x80000u, "transposed matrix %u", i);
    }
  });
}

template <class T>
void elements() {
  float x[kPack<T>];
  for (unsigned i = 0; i < kPack<T>; ++i) x[i] = static_cast<float>(i) * 1.0009765625f;
  const uint4 packed = pack<T>(x);
  T each[kPack<T>];
  std::memcpy(each, &packed, sizeof packed);
  float back[kPack<T>];
  unpack<T>(packed, back);
  for (unsigned i = 0; i < kPack<T>; ++i) {
    EXPECT(back[i] == widen(each[i]) && back[i] == widen(narrow<T>(x[i])), "element %u", i);
  }
}

void integers() {
  EXPECT(__float2int_rn(2.5f) == 2 && __float2int_rn(-3.5f) == -4 && __float2int_rn(1e20f) == 2147483647 &&
             __float2int_rn(-1e20f) == -2147483647 - 1 && __float2int_rn(std::nanf("")) == 0,
         "rounded half to even, and saturated");
  EXPECT(__byte_perm(0x33221100u, 0x77665544u, 0x7150u) == 0x77115500u, "bytes");
}

void add(const int* a, int b, long long* sum) { sum[blockIdx.y * gridDim.x + blockIdx.x] = *a + b + threadIdx.x; }

void launches() {
  const int one = 1;
  std::vector<long long> sums(6, -1);
  launch(add, dim3(3, 2), 1, 0, nullptr, &one, 'a', sums.data());  // arguments are converted
  for (const long long sum : sums) EXPECT(sum == 'a' + 1, "every block ran");
  std::vector<unsigned> orders[2];
  for (int i = 0; i < 2; ++i) {
    shim::set_seed(static_cast<std::uint64_t>(i) + 1);
    run(64, [&] { orders[i].push_back(threadIdx.x); });
    EXPECT(orders[i].size() == 64, "every thread ran");
  }
  EXPECT(orders[0] != orders[1], "threads run in random order");
  refused({"from 1 to 1024 threads, not 1025"}, 1025, [] {});
  shim::set_device({8, 6, 2, 1024});
  refused({"asks for 4096 bytes of shared memory, and the device has 1024"}, 1, [] {});
  shim::set_device({9, 0, 2, 227 * 1024});
}

}  // namespace

int main() {
  barriers();
  shared_arrays();
  shuffles();
  copies();
  global_memory();
  products();
  products_of_halves<Half>();
  products_of_halves<BFloat16>();
  matrices();
  elements<float>();
  elements<Half>();
  elements<BFloat16>();
  integers();
  launches();
  return test::failures == 0 ? 0 : 1;
}
