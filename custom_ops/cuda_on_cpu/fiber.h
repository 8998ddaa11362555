// Threads that share one of the system's: each has a stack of its own and runs until it hands over to another.
#pragma once

#include <cstddef>

namespace graphrot::shim {

// Runs `entry` from its start on a stack of its own when it is first switched to. `entry` must not return.
class Fiber {
 public:
  Fiber() = default;  // the thread that is running
  Fiber(unsigned char* stack, std::size_t bytes, void (*entry)());

  // Stops here and goes on where `next` stopped. `last`: this one is never switched to again.
  void switch_to(Fiber& next, bool last);

  // The first thing that `entry` must call.
  static void entered();

 private:
  void* place_ = nullptr;
  const void* stack_ = nullptr;  // known for the running thread once it was left
  std::size_t bytes_ = 0;
  void* shadow_ = nullptr;       // of the address sanitizer
};

// Memory for the stacks of `count` fibers, each with a page below it that must not be touched. Kept for the next block.
unsigned char* fiber_stacks(std::size_t count);
inline constexpr std::size_t kStackBytes = 256 * 1024;  // of each; what is not touched costs nothing
inline constexpr std::size_t kStackStep = kStackBytes + 64 * 1024;

}  // namespace graphrot::shim
