// A block's shared memory on the CPU. Every byte knows who wrote and who read it last, and when; time is counted in
// barriers. Bytes are poisoned until they are written, and while an asynchronous copy to them is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace graphrot::shim {

class SharedMemory {
 public:
  void begin_block(std::size_t bytes, unsigned threads);
  void block_barrier();
  void warp_barrier(unsigned warp, unsigned mask);
  void thread_leaves(unsigned thread);  // no copy of its own may be under way

  // By the running thread; what is not allowed throws a Violation.
  void read(std::size_t first, std::size_t bytes, void* to);
  void write(std::size_t first, std::size_t bytes, const void* from);

  // Asynchronous copies: nothing is copied before the wait.
  void copy(std::size_t first, const void* from, bool valid);
  void commit();
  void wait(std::size_t but);

  std::size_t bytes() const { return bytes_; }

 private:
  // Times are counts of barriers; before the block's own first time nothing happened.
  struct Byte {
    std::uint32_t written = 0, read = 0;
    std::uint16_t writer = 0, reader = 0;
  };
  struct Copy {
    std::size_t first;
    const void* from;
    bool valid;
  };
  struct Copies {
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
  };

  bool ordered(std::uint32_t time, unsigned other, unsigned self) const;
  bool readers_ordered(const Byte& byte, unsigned self) const;
  void check_range(std::size_t first, std::size_t bytes) const;
  void mark_write(std::size_t first, std::size_t bytes, const char* what);
  std::string words(const char* what, std::size_t byte) const;

  std::size_t bytes_ = 0;
  std::vector<unsigned char> memory_;
  std::vector<Byte> marks_;
  std::vector<Copies> copies_;        // by thread
  std::uint32_t clock_ = 0;
  std::uint32_t begun_ = 0, block_time_ = 0;  // when the block began, when all its threads met last
  std::vector<std::uint32_t> met_;    // [warp][lane][lane]: when two lanes were in one __syncwarp last
};

SharedMemory& shared_memory();

}  // namespace graphrot::shim
