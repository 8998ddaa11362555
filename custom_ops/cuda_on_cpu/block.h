// A block of threads on the CPU: fibers that run in random order and meet at barriers and in calls of whole warps.
// What CUDA leaves undefined is a violation here, thrown in words out of launch().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace graphrot::shim {

class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Of the running thread.
inline dim3 thread_index, block_index, block_size, grid_size;

// Runs every block of the grid, one after the other, in random order.
void launch(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& kernel);

// For tests: another order of threads and blocks, the same each time for the same seed.
void set_seed(std::uint64_t seed);

// Which of the block's threads is running; throws outside of a kernel.
unsigned thread_number();
// "thread 7" and, where there are several blocks, of which.
std::string thread_words(unsigned thread);

void barrier(int line, const char* file);

// All lanes of `mask` meet: `resolve` sees what each of them brought, at its lane's place, and leaves results there.
using Resolve = void (*)(void* const (&brought)[32], unsigned mask);
void meet(const char* what, unsigned mask, void* brought, Resolve resolve);

// Lets `mask` see each other's shared memory.
void warp_barrier(unsigned mask);

}  // namespace graphrot::shim
