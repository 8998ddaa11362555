// The C functions of benchmarks/gpu.py: memory, a clock, and the launchers of the kernels, all on one stream. Each
// returns 0, or 1 where it failed; bench_error() says why. The same file is built for the CPU, where kernels run under
// cuda_on_cpu/: then all but the times means the same.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention_cuda.h"
#include "bench/device.h"
#include "bench/peak_cuda.h"
#include "common/cuda/runtime.h"
#include "hadamard/cuda.h"
#include "matmul/product_cuda.h"
#include "matmul/rows_cuda.h"

#define BENCH_EXPORT extern "C" __attribute__((visibility("default")))

namespace graphrot::bench {
namespace {

thread_local std::string error;

template <class Work>
int attempt(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& problem) {
    error = problem.what();
    return 1;
  }
}

// A transform with its factor on the device.
struct Transform {
  CudaHadamard hadamard{};
  void* memory = nullptr;
  Transform() = default;
  ~Transform() {
    if (memory != nullptr) release(memory);
  }
  Transform(const Transform&) = delete;
  Transform& operator=(const Transform&) = delete;
};

const CudaHadamard* hadamard_of(const void* transform) {
  return transform == nullptr ? nullptr : &static_cast<const Transform*>(transform)->hadamard;
}

Element element_of(int number) { return static_cast<Element>(number); }

}  // namespace
}  // namespace graphrot::bench

using namespace graphrot;
using namespace graphrot::bench;

BENCH_EXPORT const char* bench_error() { return bench::error.c_str(); }

// 1 where kernels run on the CPU.
BENCH_EXPORT int bench_on_cpu() {
#ifdef GRAPHROT_CUDA_ON_CPU
  return 1;
#else
  return 0;
#endif
}

BENCH_EXPORT int bench_device(char* name, std::size_t name_bytes, int* numbers, std::size_t* shared_bytes) {
  return attempt([&] {
    const CudaDevice device = current_device();
    std::strncpy(name, device_name(), name_bytes - 1);
    numbers[0] = device.major;
    numbers[1] = device.minor;
    numbers[2] = device.multiprocessors;
    *shared_bytes = device.shared_bytes;
  });
}

BENCH_EXPORT void* bench_stream() {
  void* result = nullptr;
  attempt([&] { result = stream(); });
  return result;
}

BENCH_EXPORT int bench_allocate(std::size_t bytes, void** out) {
  return attempt([&] { *out = allocate(bytes); });
}

BENCH_EXPORT int bench_release(void* memory) {
  return attempt([&] { release(memory); });
}

BENCH_EXPORT int bench_upload(void* to, const void* from, std::size_t bytes) {
  return attempt([&] { upload(to, from, bytes); });
}

BENCH_EXPORT int bench_download(void* to, const void* from, std::size_t bytes) {
  return attempt([&] { download(to, from, bytes); });
}

BENCH_EXPORT int bench_copy(void* to, const void* from, std::size_t bytes) {
  return attempt([&] { copy(to, from, bytes); });
}

BENCH_EXPORT int bench_wait() {
  return attempt([&] { wait(); });
}

BENCH_EXPORT int bench_begin() {
  return attempt([&] { begin_recording(); });
}

BENCH_EXPORT int bench_end(void** recording) {
  return attempt([&] { *recording = end_recording(); });
}

BENCH_EXPORT int bench_abandon() {
  return attempt([&] { abandon_recording(); });
}

BENCH_EXPORT int bench_replay(void* recording, std::size_t count, double* seconds) {
  return attempt([&] { *seconds = replay(recording, count); });
}

BENCH_EXPORT int bench_drop(void* recording) {
  return attempt([&] { drop_recording(recording); });
}

BENCH_EXPORT int bench_peak(unsigned blocks, unsigned rounds, std::int32_t* out, double* operations) {
  return attempt([&] {
    *operations = peak_operations(blocks, rounds);
    launch_peak(blocks, rounds, out, stream());
  });
}

BENCH_EXPORT int bench_transform(std::size_t size, std::size_t order, std::size_t levels, float scale,
                                 const float* factor, void** out) {
  return attempt([&] {
    check_cuda_hadamard(size, order, current_device());
    auto made = std::make_unique<Transform>();
    made->hadamard.size = size;
    made->hadamard.order = order;
    made->hadamard.levels = levels;
    made->hadamard.scale = scale;
    if (order > 1) {
      const std::vector<std::uint8_t> bytes = cuda_factor(order, std::vector<float>(factor, factor + order * order));
      made->memory = allocate(bytes.size());
      upload(made->memory, bytes.data(), bytes.size());
      made->hadamard.factor = made->memory;
    }
    *out = made.release();
  });
}

BENCH_EXPORT int bench_drop_transform(void* transform) {
  return attempt([&] { delete static_cast<Transform*>(transform); });
}

BENCH_EXPORT int bench_hadamard(const void* transform, int element, const void* in, void* out, std::size_t blocks) {
  return attempt([&] { hadamard_cuda(*hadamard_of(transform), element_of(element), in, out, blocks, stream()); });
}

BENCH_EXPORT int bench_rows(const void* transform, int element, const void* in, std::size_t rows, std::size_t channels,
                            std::size_t group, int levels, int interleaved, std::int8_t* codes, std::size_t stride,
                            float* scales, std::int32_t* sums) {
  return attempt([&] {
    const CudaRowsProblem problem = {hadamard_of(transform), channels, group, levels, interleaved != 0};
    rows_cuda(problem, element_of(element), in, rows, CudaRows{codes, stride, scales, sums}, stream());
  });
}

namespace graphrot::bench {
namespace {

CudaProduct product_of(std::size_t channels, std::size_t columns, std::size_t group, std::size_t block, int bits,
                       const std::uint8_t* codes, const void* scales, int half_scales, const std::uint8_t* zeros,
                       const float* bias) {
  CudaProduct result{};
  result.channels = channels;
  result.columns = columns;
  result.group = group;
  result.groups = (channels + group - 1) / group;
  result.block = block;
  result.bits = bits;
  result.zero = 1 << (bits - 1);
  result.codes = codes;
  result.scales = scales;
  result.half_scales = half_scales != 0;
  result.zeros = zeros;
  result.bias = bias;
  return result;
}

struct AttentionNumbers {
  AttentionForm form;
  AttentionCall call;
};

// Past and present are one buffer.
AttentionNumbers attention_of(std::size_t heads, std::size_t kv_heads, std::size_t head_size, int bits,
                              std::size_t batch, std::size_t tokens, std::size_t slots, float scale, const void* query,
                              const void* key, const void* value, std::uint8_t* present_key,
                              std::uint8_t* present_value, const std::int32_t* last_slots, void* output) {
  AttentionNumbers result{};
  result.form = {heads, kv_heads, {head_size, bits}, scale, 0.0f, -1, true};
  AttentionCall& call = result.call;
  call.batch = batch;
  call.tokens = tokens;
  call.query = query;
  call.key = key;
  call.value = value;
  call.past_slots = call.slots = slots;
  call.past_key = call.present_key = present_key;
  call.past_value = call.present_value = present_value;
  call.last_slots = last_slots;
  call.output = output;
  return result;
}

}  // namespace
}  // namespace graphrot::bench

BENCH_EXPORT int bench_product_scratch(std::size_t channels, std::size_t columns, std::size_t group, std::size_t block,
                                       int bits, const std::uint8_t* codes, const void* scales, int half_scales,
                                       const std::uint8_t* zeros, const float* bias, std::size_t rows,
                                       std::size_t* bytes) {
  return attempt([&] {
    *bytes = product_cuda_scratch_bytes(
        product_of(channels, columns, group, block, bits, codes, scales, half_scales, zeros, bias), rows);
  });
}

BENCH_EXPORT int bench_product(std::size_t channels, std::size_t columns, std::size_t group, std::size_t block,
                               int bits, const std::uint8_t* codes, const void* scales, int half_scales,
                               const std::uint8_t* zeros, const float* bias, std::int8_t* row_codes, std::size_t stride,
                               float* row_scales, std::int32_t* sums, std::size_t rows, int element, void* out,
                               void* scratch) {
  return attempt([&] {
    product_cuda(product_of(channels, columns, group, block, bits, codes, scales, half_scales, zeros, bias),
                 CudaRows{row_codes, stride, row_scales, sums}, element_of(element), rows, out, scratch, stream());
  });
}

BENCH_EXPORT int bench_attention_scratch(std::size_t heads, std::size_t kv_heads, std::size_t head_size, int bits,
                                         std::size_t batch, std::size_t tokens, std::size_t slots, float scale,
                                         const void* query, const void* key, const void* value,
                                         std::uint8_t* present_key, std::uint8_t* present_value,
                                         const std::int32_t* last_slots, void* output, std::size_t* bytes) {
  return attempt([&] {
    const AttentionNumbers numbers = attention_of(heads, kv_heads, head_size, bits, batch, tokens, slots, scale, query,
                                                  key, value, present_key, present_value, last_slots, output);
    *bytes = attention_cuda_scratch_bytes(numbers.form, numbers.call);
  });
}

BENCH_EXPORT int bench_attention(const void* transform, int element, std::size_t heads, std::size_t kv_heads,
                                 std::size_t head_size, int bits, std::size_t batch, std::size_t tokens,
                                 std::size_t slots, float scale, const void* query, const void* key, const void* value,
                                 std::uint8_t* present_key, std::uint8_t* present_value,
                                 const std::int32_t* last_slots, void* output, void* scratch) {
  return attempt([&] {
    const AttentionNumbers numbers = attention_of(heads, kv_heads, head_size, bits, batch, tokens, slots, scale, query,
                                                  key, value, present_key, present_value, last_slots, output);
    attention_cuda(numbers.form, hadamard_of(transform), element_of(element), numbers.call, scratch, stream());
  });
}
