#include "cuda_on_cpu/shared_memory.h"

#include <cstring>

#include "cuda_on_cpu/block.h"
#include "cuda_on_cpu/guarded.h"

namespace graphrot::shim {
namespace {

constexpr unsigned kLanes = 32;
constexpr std::size_t kCopied = 16;
constexpr unsigned char kPoison = 0xff;
constexpr std::uint32_t kUnderWay = 0xffffffffu;
// Readers: one thread, several lanes of one warp, or threads of several warps.
constexpr std::uint16_t kSeveralLanes = 0x8000u, kSeveralWarps = 0xffffu;

}  // namespace

SharedMemory& shared_memory() {
  static SharedMemory memory;
  return memory;
}

void SharedMemory::begin_block(std::size_t bytes, unsigned threads) {
  bytes_ = bytes;
  if (clock_ > 0xf0000000u) {  // times would run out: forget them
    clock_ = 0;
    marks_.assign(marks_.size(), Byte{});
  }
  begun_ = block_time_ = ++clock_;
  memory_.assign(bytes, kPoison);
  if (marks_.size() < bytes) marks_.resize(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    if (marks_[i].written == kUnderWay) marks_[i] = Byte{};  // a block that was broken off
  }
  copies_.assign(threads, Copies{});
  met_.assign((threads + kLanes - 1) / kLanes * kLanes * kLanes, begun_);
}

void SharedMemory::block_barrier() { block_time_ = ++clock_; }

void SharedMemory::warp_barrier(unsigned warp, unsigned mask) {
  ++clock_;
  std::uint32_t* const table = met_.data() + std::size_t{warp} * kLanes * kLanes;
  for (unsigned a = 0; a < kLanes; ++a) {
    if ((mask >> a & 1u) == 0) continue;
    for (unsigned b = 0; b < kLanes; ++b) {
      if ((mask >> b & 1u) != 0) table[a * kLanes + b] = clock_;
    }
  }
}

void SharedMemory::thread_leaves(unsigned thread) {
  const Copies& copies = copies_[thread];
  bool left = !copies.open.empty();
  for (const std::vector<Copy>& group : copies.groups) left = left || !group.empty();
  if (left) throw Violation(thread_words(thread) + " leaves the kernel with asynchronous copies never waited for");
}

// Whether what `other` did at `time` is seen by `self` now.
bool SharedMemory::ordered(std::uint32_t time, unsigned other, unsigned self) const {
  if (other == self || time < block_time_) return true;
  if (other / kLanes != self / kLanes) return false;
  return time < met_[(std::size_t{self / kLanes} * kLanes + self % kLanes) * kLanes + other % kLanes];
}

bool SharedMemory::readers_ordered(const Byte& byte, unsigned self) const {
  if (byte.read < block_time_) return true;
  if (byte.reader == kSeveralWarps) return false;
  if (byte.reader < kSeveralLanes) return ordered(byte.read, byte.reader, self);
  const unsigned warp = byte.reader - kSeveralLanes;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if (!ordered(byte.read, warp * kLanes + lane, self)) return false;
  }
  return true;
}

std::string SharedMemory::words(const char* what, std::size_t byte) const {
  return thread_words(thread_number()) + " " + what + " byte " + std::to_string(byte) + " of shared memory, ";
}

void SharedMemory::check_range(std::size_t first, std::size_t bytes) const {
  if (first + bytes > bytes_) {
    throw Violation(thread_words(thread_number()) + " touches bytes " + std::to_string(first) + " to " +
                    std::to_string(first + bytes - 1) + " of shared memory, and the block has " + std::to_string(bytes_));
  }
}

void SharedMemory::read(std::size_t first, std::size_t bytes, void* to) {
  check_range(first, bytes);
  const unsigned self = thread_number();
  for (std::size_t i = first; i < first + bytes; ++i) {
    Byte& byte = marks_[i];
    if (byte.written == kUnderWay) throw Violation(words("reads", i) + "where a copy is under way");
    if (byte.written < begun_) throw Violation(words("reads", i) + "which was never written");
    if (!ordered(byte.written, byte.writer, self)) {
      throw Violation(words("reads", i) + "which " + thread_words(byte.writer) + " wrote with no barrier in between");
    }
    if (byte.read < block_time_ || byte.reader == self) {
      byte.reader = static_cast<std::uint16_t>(self);
    } else if (byte.reader != kSeveralWarps) {
      const unsigned warp = byte.reader >= kSeveralLanes ? byte.reader - kSeveralLanes : byte.reader / kLanes;
      byte.reader = warp == self / kLanes ? static_cast<std::uint16_t>(kSeveralLanes + warp) : kSeveralWarps;
    }
    byte.read = clock_;
  }
  std::memcpy(to, memory_.data() + first, bytes);
}

void SharedMemory::mark_write(std::size_t first, std::size_t bytes, const char* what) {
  check_range(first, bytes);
  const unsigned self = thread_number();
  for (std::size_t i = first; i < first + bytes; ++i) {
    Byte& byte = marks_[i];
    if (byte.written == kUnderWay) throw Violation(words(what, i) + "where a copy is under way");
    if (byte.written >= begun_ && !ordered(byte.written, byte.writer, self)) {
      throw Violation(words(what, i) + "which " + thread_words(byte.writer) + " wrote with no barrier in between");
    }
    if (byte.read >= begun_ && !readers_ordered(byte, self)) {
      throw Violation(words(what, i) + "which another thread read with no barrier in between");
    }
    byte.writer = static_cast<std::uint16_t>(self);
    byte.written = clock_;
  }
}

void SharedMemory::write(std::size_t first, std::size_t bytes, const void* from) {
  mark_write(first, bytes, "writes");
  std::memcpy(memory_.data() + first, from, bytes);
}

void SharedMemory::copy(std::size_t first, const void* from, bool valid) {
  mark_write(first, kCopied, "begins a copy to");
  if (reinterpret_cast<std::uintptr_t>(from) % kCopied != 0) {  // whether it is read or not
    throw Violation(thread_words(thread_number()) + " copies 16 bytes of global memory that are not aligned");
  }
  if (valid) check_global(from, kCopied, kCopied, "copies");
  for (std::size_t i = first; i < first + kCopied; ++i) {
    marks_[i].written = kUnderWay;
    memory_[i] = kPoison;
  }
  copies_[thread_number()].open.push_back({first, from, valid});
}

void SharedMemory::commit() {
  Copies& copies = copies_[thread_number()];
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}

void SharedMemory::wait(std::size_t but) {
  Copies& copies = copies_[thread_number()];
  for (; copies.groups.size() > but; copies.groups.pop_front()) {
    for (const Copy& each : copies.groups.front()) {
      for (std::size_t i = each.first; i < each.first + kCopied; ++i) marks_[i].written = clock_;
      if (each.valid) {
        std::memcpy(memory_.data() + each.first, each.from, kCopied);
      } else {
        std::memset(memory_.data() + each.first, 0, kCopied);
      }
    }
  }
}

}  // namespace graphrot::shim
