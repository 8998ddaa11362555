// What the host needs of CUDA, in plain C++: files that include this need no CUDA compiler.
#pragma once

#include <cstddef>

namespace graphrot {

using CudaStream = void*;  // a cudaStream_t

struct CudaDevice {
  int major, minor;           // compute capability
  int multiprocessors;
  std::size_t shared_bytes;   // that one block may ask for, at most
};

// Of the calling thread's current device. Throws std::runtime_error with CUDA's own text.
CudaDevice current_device();

// Both wait until the bytes are there: for memory that is filled or looked at once, before anything runs.
void copy_to_device(void* device, const void* host, std::size_t bytes);
void copy_to_host(void* host, const void* device, std::size_t bytes);

}  // namespace graphrot
