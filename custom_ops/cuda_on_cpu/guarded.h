// Global memory for tests: a buffer whose surroundings are known, so that a kernel that writes beside it is found, and
// one that reads beside it in 16 bytes is refused.
#pragma once

#include <cstddef>
#include <vector>

namespace graphrot::shim {

// Refuses an access that is not aligned, or that is partly or wholly in the surroundings of a Guarded buffer.
void check_global(const void* address, std::size_t bytes, std::size_t alignment, const char* what);

class GuardedBytes {
 public:
  explicit GuardedBytes(std::size_t bytes);  // every byte is 0xff: NaN in all types of numbers
  ~GuardedBytes();
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  unsigned char* data() { return memory_.data() + start_; }
  const unsigned char* data() const { return memory_.data() + start_; }
  std::size_t bytes() const { return bytes_; }
  bool kept() const;  // nothing was written beside the buffer
  bool surrounds(const unsigned char* first, std::size_t bytes) const;  // some of it lies beside the buffer

 private:
  std::size_t bytes_, start_;
  std::vector<unsigned char> memory_;
};

template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t count) : count_(count), bytes_(count * sizeof(T)) {}
  explicit Guarded(const std::vector<T>& values) : Guarded(values.size()) {
    for (std::size_t i = 0; i < count_; ++i) data()[i] = values[i];
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data()); }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  bool kept() const { return bytes_.kept(); }

 private:
  std::size_t count_;
  GuardedBytes bytes_;
};

}  // namespace graphrot::shim
