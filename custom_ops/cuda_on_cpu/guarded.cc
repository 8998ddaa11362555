#include "cuda_on_cpu/guarded.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda_on_cpu/block.h"

namespace graphrot::shim {
namespace {

constexpr std::size_t kAlignment = 256;  // as CUDA's own allocations
constexpr std::size_t kGuard = 1024;
constexpr unsigned char kFill = 0xff;

std::vector<const GuardedBytes*>& all_buffers() {
  static std::vector<const GuardedBytes*> all;
  return all;
}

}  // namespace

GuardedBytes::GuardedBytes(std::size_t bytes) : bytes_(bytes), memory_(bytes + 2 * kGuard + kAlignment, kFill) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
  start_ = kGuard + (kAlignment - address % kAlignment) % kAlignment;
  all_buffers().push_back(this);
}

GuardedBytes::~GuardedBytes() {
  std::vector<const GuardedBytes*>& all = all_buffers();
  all.erase(std::find(all.begin(), all.end(), this));
}

bool GuardedBytes::kept() const {
  const auto end = memory_.begin() + static_cast<std::ptrdiff_t>(start_ + bytes_);
  const auto changed = [](unsigned char byte) { return byte != kFill; };
  return std::none_of(memory_.begin(), memory_.begin() + static_cast<std::ptrdiff_t>(start_), changed) &&
         std::none_of(end, memory_.end(), changed);
}

bool GuardedBytes::surrounds(const unsigned char* first, std::size_t bytes) const {
  const auto from = reinterpret_cast<std::uintptr_t>(first), to = from + bytes;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory_.data()), end = begin + memory_.size();
  const auto inner = begin + start_;
  return from < end && to > begin && (from < inner || to > inner + bytes_);
}

void check_global(const void* address, std::size_t bytes, std::size_t alignment, const char* what) {
  const auto* const first = static_cast<const unsigned char*>(address);
  const std::string size = std::to_string(bytes) + " bytes of global memory";
  if (reinterpret_cast<std::uintptr_t>(first) % alignment != 0) {
    throw Violation(thread_words(thread_number()) + " " + what + " " + size + " that are not aligned");
  }
  for (const GuardedBytes* each : all_buffers()) {
    if (each->surrounds(first, bytes)) {
      throw Violation(thread_words(thread_number()) + " " + what + " " + size + " at " +
                      std::to_string(first - each->data()) + " of a buffer of " + std::to_string(each->bytes()));
    }
  }
}

}  // namespace graphrot::shim
