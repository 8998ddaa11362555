// Memory, one stream and a clock, for the benchmarks alone: of the GPU, or of this machine where kernels run on the CPU.
#pragma once

#include <cstddef>

#include "common/cuda/runtime.h"

namespace graphrot::bench {

// All work goes here. Throws std::runtime_error, as everything below does.
CudaStream stream();

void* allocate(std::size_t bytes);
void release(void* memory);

// To and from this machine's memory; the call returns when it is done.
void upload(void* to, const void* from, std::size_t bytes);
void download(void* to, const void* from, std::size_t bytes);

// Within the device, on the stream.
void copy(void* to, const void* from, std::size_t bytes);

void wait();

// What is launched between the two is recorded, and runs when it is replayed; on the CPU it runs at once as well.
void begin_recording();
void* end_recording();
void abandon_recording();  // after a launch that failed; says nothing
void drop_recording(void* recording);

// Seconds of `count` replays, one after the other, by the device's own clock. On the CPU those of the first run.
double replay(void* recording, std::size_t count);

// The name of the device; "" on the CPU.
const char* device_name();

}  // namespace graphrot::bench
