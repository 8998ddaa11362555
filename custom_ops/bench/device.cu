#include "bench/device.h"

#include <stdexcept>
#include <string>

#include "common/cuda/device.cuh"

#ifdef GRAPHROT_CUDA_ON_CPU

#include <chrono>
#include <cstdlib>
#include <cstring>

namespace graphrot::bench {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point began;

}  // namespace

CudaStream stream() { return nullptr; }

void* allocate(std::size_t bytes) {
  void* const memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (memory == nullptr) throw std::runtime_error("no memory for " + std::to_string(bytes) + " bytes");
  return memory;
}

void release(void* memory) { std::free(memory); }
void upload(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void download(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void wait() {}
void begin_recording() { began = Clock::now(); }

void* end_recording() { return new double(std::chrono::duration<double>(Clock::now() - began).count()); }

void abandon_recording() {}

void drop_recording(void* recording) { delete static_cast<double*>(recording); }

double replay(void* recording, std::size_t count) {
  return *static_cast<const double*>(recording) * static_cast<double>(count);
}

const char* device_name() { return ""; }

}  // namespace graphrot::bench

#else

namespace graphrot::bench {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // what follows is not blamed for it
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

cudaStream_t the_stream() {
  static cudaStream_t const made = [] {
    cudaStream_t result = nullptr;
    check(cudaStreamCreateWithFlags(&result, cudaStreamNonBlocking), "cudaStreamCreate");
    return result;
  }();
  return made;
}

struct Event {
  Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

}  // namespace

CudaStream stream() { return the_stream(); }

void* allocate(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return memory;
}

void release(void* memory) { check(cudaFree(memory), "cudaFree"); }

void upload(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, the_stream()), "copying to the device");
  wait();
}

void download(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, the_stream()), "copying from the device");
  wait();
}

void copy(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, the_stream()), "copying on the device");
}

void wait() { check(cudaStreamSynchronize(the_stream()), "waiting for the device"); }

void begin_recording() {
  check(cudaStreamBeginCapture(the_stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

void* end_recording() {
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(the_stream(), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t ready = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&ready, graph, 0);
  cudaGraphDestroy(graph);
  check(status, "cudaGraphInstantiate");
  return ready;
}

void abandon_recording() {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(the_stream(), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
}

void drop_recording(void* recording) {
  check(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(recording)), "cudaGraphExecDestroy");
}

double replay(void* recording, std::size_t count) {
  const Event before, after;
  check(cudaEventRecord(before.event, the_stream()), "cudaEventRecord");
  for (std::size_t i = 0; i < count; ++i) {
    check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(recording), the_stream()), "cudaGraphLaunch");
  }
  check(cudaEventRecord(after.event, the_stream()), "cudaEventRecord");
  check(cudaEventSynchronize(after.event), "waiting for the device");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, before.event, after.event), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

const char* device_name() {
  static cudaDeviceProp properties;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return properties.name;
}

}  // namespace graphrot::bench

#endif
