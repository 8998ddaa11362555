// Counts the memory of a test program: what is held now, and the most that was. Included by one file of a program,
// whose operators new and delete these are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace graphrot::test {

inline std::atomic<std::size_t> live_bytes{0}, most_bytes{0};

// In front of what is handed out: how large it is.
inline constexpr std::size_t kHeader = 64;

inline void* counted(std::size_t bytes) {
  auto* raw = static_cast<unsigned char*>(std::malloc(bytes + kHeader));
  if (raw == nullptr) throw std::bad_alloc();
  std::memcpy(raw, &bytes, sizeof bytes);
  const std::size_t now = live_bytes += bytes;
  std::size_t most = most_bytes;
  while (now > most && !most_bytes.compare_exchange_weak(most, now)) {
  }
  return raw + kHeader;
}

inline void uncount(void* memory) noexcept {
  if (memory == nullptr) return;
  auto* raw = static_cast<unsigned char*>(memory) - kHeader;
  std::size_t bytes;
  std::memcpy(&bytes, raw, sizeof bytes);
  live_bytes -= bytes;
  std::free(raw);
}

}  // namespace graphrot::test

void* operator new(std::size_t bytes) { return graphrot::test::counted(bytes); }
void* operator new[](std::size_t bytes) { return graphrot::test::counted(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {  // std::stable_sort takes this one
  try {
    return graphrot::test::counted(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory, const std::nothrow_t&) noexcept { graphrot::test::uncount(memory); }
void operator delete(void* memory) noexcept { graphrot::test::uncount(memory); }
void operator delete[](void* memory) noexcept { graphrot::test::uncount(memory); }
void operator delete(void* memory, std::size_t) noexcept { graphrot::test::uncount(memory); }
void operator delete[](void* memory, std::size_t) noexcept { graphrot::test::uncount(memory); }
