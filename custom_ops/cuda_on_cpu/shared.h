// Shared memory as kernels write it (common/cuda/shared.cuh): arrays whose elements check every access.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "cuda_on_cpu/block.h"
#include "cuda_on_cpu/shared_memory.h"

namespace graphrot::shim {

// An element, or a vector of them. Not copied: `auto x = a[i]` would read later than it looks.
template <class T>
class Reference {
 public:
  explicit Reference(std::size_t byte) : byte_(byte) {}
  Reference(const Reference&) = delete;

  operator T() const {
    T value;
    shared_memory().read(byte_, sizeof value, &value);
    return value;
  }
  T operator=(const T& value) const {
    shared_memory().write(byte_, sizeof value, &value);
    return value;
  }
  T operator=(const Reference& other) const { return *this = static_cast<T>(other); }
  template <class U>
  T operator+=(const U& value) const {
    return *this = static_cast<T>(static_cast<T>(*this) + value);
  }
  template <class U>
  T operator*=(const U& value) const {
    return *this = static_cast<T>(static_cast<T>(*this) * value);
  }

 private:
  std::size_t byte_;
};

// Where an element is.
template <class T>
class SharedAddress {
 public:
  SharedAddress(std::size_t byte, std::size_t end) : byte_(byte), end_(end) {}

  // For an access of `bytes`, aligned to as many.
  std::size_t offset(std::size_t bytes) const {
    if (byte_ % bytes != 0 || byte_ + bytes > end_) {
      throw Violation(thread_words(thread_number()) + " takes " + std::to_string(bytes) + " bytes at " +
                      std::to_string(byte_) + " of shared memory, in an array that ends at " + std::to_string(end_));
    }
    return byte_;
  }

 private:
  std::size_t byte_, end_;
};

template <class T>
class Shared {
 public:
  static_assert(std::is_trivially_copyable_v<T>, "memory has no constructors");

  Shared() = default;
  Shared(std::size_t byte, std::size_t count) : byte_(byte), count_(count) {
    if (byte % alignof(T) != 0 || byte + count * sizeof(T) > shared_memory().bytes()) {
      throw Violation("an array of shared memory from byte " + std::to_string(byte) + " to " +
                      std::to_string(byte + count * sizeof(T)) + " is not aligned, or beyond the block's " +
                      std::to_string(shared_memory().bytes()));
    }
  }

  Reference<T> operator[](std::size_t i) const {
    check(i, sizeof(T));
    return Reference<T>(byte_ + i * sizeof(T));
  }
  template <class V>
  Reference<V> vector(std::size_t i) const {
    check(i, sizeof(V));
    if ((byte_ + i * sizeof(T)) % sizeof(V) != 0) {
      throw Violation(thread_words(thread_number()) + " takes " + std::to_string(sizeof(V)) + " bytes at element " +
                      std::to_string(i) + " of shared memory, which are not aligned");
    }
    return Reference<V>(byte_ + i * sizeof(T));
  }
  SharedAddress<T> at(std::size_t i) const { return {byte_ + i * sizeof(T), byte_ + count_ * sizeof(T)}; }
  Shared part(std::size_t first, std::size_t count) const {
    if (first + count > count_) check(first + count, 0);
    return Shared(byte_ + first * sizeof(T), count);
  }

 private:
  void check(std::size_t i, std::size_t bytes) const {
    if (i > count_ || i * sizeof(T) + bytes > count_ * sizeof(T)) {
      throw Violation(thread_words(thread_number()) + " takes " + std::to_string(bytes) + " bytes at element " +
                      std::to_string(i) + " of an array of " + std::to_string(count_) + " in shared memory");
    }
  }

  std::size_t byte_ = 0, count_ = 0;
};

}  // namespace graphrot::shim
