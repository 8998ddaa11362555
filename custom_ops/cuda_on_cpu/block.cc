#include "cuda_on_cpu/block.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda_on_cpu/fiber.h"
#include "cuda_on_cpu/shared_memory.h"
#include "cuda_on_cpu/shim.h"

namespace graphrot::shim {
namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned kMostThreads = 1024;

enum class State : unsigned char { kReady, kAtBarrier, kInWarp, kDone };

struct Thread {
  Fiber fiber;
  State state = State::kReady;
};

// Lanes that wait for the others of their mask.
struct Meeting {
  const char* what;
  unsigned mask, arrived;
  void* brought[kLanes];
};

std::string hexadecimal(unsigned value) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += kDigits[(value >> shift) & 15u];
  return text;
}

class Block {
 public:
  Block(unsigned threads, std::uint64_t& random, const std::function<void()>& kernel)
      : threads_(threads), meetings_((threads + kLanes - 1) / kLanes), random_(random), kernel_(kernel) {
    unsigned char* const stacks = fiber_stacks(threads);
    for (unsigned i = 0; i < threads; ++i) {
      threads_[i].fiber = Fiber(stacks + i * kStackStep + (kStackStep - kStackBytes), kStackBytes, &entry);
      ready_.push_back(i);
    }
  }

  // Throws what a thread threw.
  void run() {
    const unsigned first = pick();
    enter(first);
    main_.switch_to(threads_[first].fiber, false);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

  unsigned running() const { return running_; }

  void barrier(int line, const char* file) {
    // Nothing that owns memory may live here while other threads run: a violation leaves this stack as it is.
    if (done_ > 0) {
      throw Violation(thread_words(running_) + " waits at __syncthreads (" + place(line, file) +
                      ") that other threads have left the kernel without");
    }
    if (at_barrier_ > 0 && (line != line_ || file != file_)) {
      throw Violation("threads meet at different barriers: __syncthreads of " + place(line_, file_) + " and of " +
                      place(line, file));
    }
    line_ = line, file_ = file;
    threads_[running_].state = State::kAtBarrier;
    if (++at_barrier_ == threads_.size()) {
      at_barrier_ = 0;
      shared_memory().block_barrier();
      for (unsigned i = 0; i < threads_.size(); ++i) wake(i);
    }
    hand_over();
  }

  void meet(const char* what, unsigned mask, void* brought, Resolve resolve) {
    const unsigned warp = running_ / kLanes, lane = running_ % kLanes;
    if ((mask >> lane & 1u) == 0) {
      throw Violation(thread_words(running_) + " calls " + call(what, mask) + ", which lacks its lane");
    }
    const std::size_t lanes = std::min<std::size_t>(kLanes, threads_.size() - warp * kLanes);
    if (lanes < kLanes && mask >> lanes != 0) {
      throw Violation(call(what, mask) + " names lanes that the block does not have: its last warp has " +
                      std::to_string(lanes));
    }
    std::vector<Meeting>& meetings = meetings_[warp];
    auto found = meetings.begin();
    while (found != meetings.end() && (found->mask & mask) == 0) ++found;
    if (found != meetings.end() && (found->mask != mask || std::strcmp(found->what, what) != 0)) {
      throw Violation("lanes of a warp meet in different calls: " + call(what, mask) + " and " +
                      call(found->what, found->mask));
    }
    if (found == meetings.end()) found = meetings.insert(found, {what, mask, 0, {}});
    found->brought[lane] = brought;
    found->arrived |= 1u << lane;
    threads_[running_].state = State::kInWarp;
    if (found->arrived == mask) {
      const Meeting complete = *found;
      meetings.erase(found);
      resolve(complete.brought, mask);
      for (unsigned i = 0; i < kLanes; ++i) {
        if ((mask >> i & 1u) != 0) wake(warp * kLanes + i);
      }
    }
    hand_over();
  }

 private:
  static void entry();

  static std::string place(int line, const char* file) { return std::string(file) + ":" + std::to_string(line); }
  static std::string call(const char* what, unsigned mask) {
    return std::string(what) + " with mask " + hexadecimal(mask);
  }

  void wake(unsigned thread) {
    threads_[thread].state = State::kReady;
    ready_.push_back(thread);
  }

  unsigned pick() {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    const std::size_t place = static_cast<std::size_t>((random_ >> 11) % ready_.size());
    const unsigned thread = ready_[place];
    ready_[place] = ready_.back();
    ready_.pop_back();
    return thread;
  }

  void enter(unsigned thread) {
    running_ = thread;
    thread_index = dim3(thread % block_size.x, thread / block_size.x % block_size.y, thread / block_size.x / block_size.y);
  }

  void hand_over() {
    if (ready_.empty()) throw Violation(stuck());
    const unsigned from = running_, next = pick();
    if (next == from) return;
    enter(next);
    threads_[from].fiber.switch_to(threads_[next].fiber, false);
  }

  std::string stuck() const {
    std::string text = "no thread can go on:";
    if (at_barrier_ > 0) {
      text += " " + std::to_string(at_barrier_) + " wait at __syncthreads (" + place(line_, file_) + ");";
    }
    for (std::size_t warp = 0; warp < meetings_.size(); ++warp) {
      for (const Meeting& each : meetings_[warp]) {
        text += " warp " + std::to_string(warp) + " waits in " + call(each.what, each.mask) + " for lanes " +
                hexadecimal(each.mask & ~each.arrived) + ";";
      }
    }
    text.back() = '.';
    return text;
  }

  // The running thread is at its end.
  void leave() {
    Thread& self = threads_[running_];
    self.state = State::kDone;
    ++done_;
    if (failure_ == nullptr && at_barrier_ > 0) {
      failure_ = std::make_exception_ptr(Violation(thread_words(running_) + " leaves the kernel while others wait at " +
                                                   "__syncthreads (" + place(line_, file_) + ")"));
    }
    if (failure_ == nullptr && ready_.empty() && done_ < threads_.size()) {
      failure_ = std::make_exception_ptr(Violation(stuck()));
    }
    if (failure_ != nullptr || done_ == threads_.size()) self.fiber.switch_to(main_, true);
    const unsigned next = pick();
    enter(next);
    self.fiber.switch_to(threads_[next].fiber, true);
  }

  std::vector<Thread> threads_;
  std::vector<std::vector<Meeting>> meetings_;  // by warp
  std::vector<unsigned> ready_;
  std::uint64_t& random_;
  const std::function<void()>& kernel_;
  Fiber main_;
  unsigned running_ = 0;
  std::size_t at_barrier_ = 0, done_ = 0;
  int line_ = 0;
  const char* file_ = "";
  std::exception_ptr failure_;
};

Block* current = nullptr;
std::uint64_t random_state = 0x9e3779b97f4a7c15u;

void Block::entry() {
  Fiber::entered();
  Block& block = *current;
  try {
    block.kernel_();
    shared_memory().thread_leaves(block.running_);
  } catch (...) {
    block.failure_ = std::current_exception();
  }
  block.leave();
}

Block& running_block() {
  if (current == nullptr) throw Violation("called outside of a kernel");
  return *current;
}

}  // namespace

void set_seed(std::uint64_t seed) { random_state = seed * 0x9e3779b97f4a7c15u | 1u; }

unsigned thread_number() { return running_block().running(); }

std::string thread_words(unsigned thread) {
  std::string text = "thread " + std::to_string(thread);
  if (grid_size.x * grid_size.y * grid_size.z > 1) {
    text += " of block (" + std::to_string(block_index.x) + ", " + std::to_string(block_index.y) + ", " +
            std::to_string(block_index.z) + ")";
  }
  return text;
}

void barrier(int line, const char* file) { running_block().barrier(line, file); }

void meet(const char* what, unsigned mask, void* brought, Resolve resolve) {
  running_block().meet(what, mask, brought, resolve);
}

void warp_barrier(unsigned mask) {
  meet("__syncwarp", mask, nullptr, [](void* const(&)[32], unsigned all) {
    shared_memory().warp_barrier(thread_number() / kLanes, all);
  });
}

void launch(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& kernel) {
  static std::mutex mutex;  // fibers are one system thread's
  const std::lock_guard<std::mutex> lock(mutex);
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || block.z > 64) {
    throw Violation("a block has from 1 to 1024 threads, not " + std::to_string(threads));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535u || grid.z > 65535u) {
    throw Violation("no grid can be " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
                    std::to_string(grid.z) + " blocks");
  }
  if (shared_bytes > current_device().shared_bytes) {
    throw Violation("a block asks for " + std::to_string(shared_bytes) + " bytes of shared memory, and the device has " +
                    std::to_string(current_device().shared_bytes));
  }
  std::vector<unsigned> order(std::size_t{grid.x} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = order.size(); i > 1; --i) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    std::swap(order[i - 1], order[(random_state >> 11) % i]);
  }
  grid_size = grid, block_size = block;
  for (const unsigned place : order) {
    block_index = dim3(place % grid.x, place / grid.x % grid.y, place / grid.x / grid.y);
    shared_memory().begin_block(shared_bytes, static_cast<unsigned>(threads));
    Block all(static_cast<unsigned>(threads), random_state, kernel);
    current = &all;
    try {
      all.run();
    } catch (...) {
      current = nullptr;
      throw;
    }
    current = nullptr;
  }
}

}  // namespace graphrot::shim
