// Shared memory of a block: dynamic alone, as arrays at offsets in bytes that the kernel shares out itself.
//
//   auto rows = shared_array<float>(0, 1024);              // the first 4096 bytes
//   rows[i] = 1.0f;  float x = rows[i];                     // never `auto x`: on the CPU that is a checked reference
//   uint4 four = rows.vector<uint4>(i);                     // 16 bytes from element i on, aligned to 16 bytes
//   cp_async16(rows.at(i), from, true);                     // ptx.cuh
//
// On the CPU every access is checked: bounds, alignment, memory that was never written, bytes that another thread
// touched with no barrier in between, bytes of a copy under way.
#pragma once

#include "common/cuda/device.cuh"

namespace graphrot::cuda {

#if defined(GRAPHROT_CUDA_ON_CPU)

template <class T>
using Shared = shim::Shared<T>;

template <class T>
using SharedAddress = shim::SharedAddress<T>;

template <class T>
inline Shared<T> shared_array(unsigned byte_offset, unsigned count) {
  return Shared<T>(byte_offset, count);
}

#else

template <class T>
using SharedAddress = T*;

template <class T>
class Shared {
 public:
  Shared() = default;
  GRAPHROT_DEVICE explicit Shared(T* first) : first_(first) {}
  GRAPHROT_DEVICE T& operator[](unsigned i) const { return first_[i]; }
  // The V that starts at element i.
  template <class V>
  GRAPHROT_DEVICE V& vector(unsigned i) const {
    return *reinterpret_cast<V*>(first_ + i);
  }
  GRAPHROT_DEVICE SharedAddress<T> at(unsigned i) const { return first_ + i; }
  // `count` elements from `first` on, as an array of its own.
  GRAPHROT_DEVICE Shared part(unsigned first, unsigned count) const {
    (void)count;
    return Shared(first_ + first);
  }

 private:
  T* first_ = nullptr;
};

template <class T>
GRAPHROT_DEVICE Shared<T> shared_array(unsigned byte_offset, unsigned count) {
  extern __shared__ uint4 graphrot_shared_memory[];
  (void)count;
  return Shared<T>(reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(graphrot_shared_memory) + byte_offset));
}

#endif

}  // namespace graphrot::cuda
