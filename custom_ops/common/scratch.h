// Working memory that kernels take while they run and give back. All kernels of the library share it, so that a
// model with hundreds of nodes holds what one of them needs on each thread; it goes with the last kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace graphrot {

class ScratchPool {
 public:
  static constexpr std::size_t kAlignment = 64;

  // A kernel's hold on the pool that all kernels share, which goes with the last of them. No std::shared_ptr: it would
  // ask for a newer C library.
  class Shared {
   public:
    Shared() {
      const std::lock_guard<std::mutex> lock(mutex());
      if (users() == 0) pool() = new ScratchPool;
      ++users();
    }
    ~Shared() {
      const std::lock_guard<std::mutex> lock(mutex());
      if (--users() > 0) return;
      delete pool();
      pool() = nullptr;
    }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

    ScratchPool& operator*() const { return *pool(); }

   private:
    static std::mutex& mutex() {
      static std::mutex instance;
      return instance;
    }
    static std::size_t& users() {
      static std::size_t count = 0;
      return count;
    }
    static ScratchPool*& pool() {
      static ScratchPool* instance = nullptr;  // nothing that is taken down before the kernels, when a process ends
      return instance;
    }
  };

  // `bytes` of memory, aligned to 64 bytes, until the end of the lease. Throws std::bad_alloc.
  class Lease {
   public:
    Lease(ScratchPool& pool, std::size_t bytes) : pool_(pool), block_(pool.take(bytes + kAlignment - 1)) {}
    ~Lease() { pool_.give_back(std::move(block_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    void* data() const {
      const auto address = reinterpret_cast<std::uintptr_t>(block_.memory.get());
      return block_.memory.get() + ((kAlignment - address % kAlignment) % kAlignment);
    }

   private:
    ScratchPool& pool_;
    struct Block {
      std::unique_ptr<unsigned char[]> memory;
      std::size_t bytes = 0;
    } block_;
    friend class ScratchPool;
  };

 private:
  // The smallest free block that is large enough; else the largest one is replaced by a new one.
  Lease::Block take(std::size_t bytes) {
    Lease::Block block;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::size_t best = free_.size();
      for (std::size_t i = 0; i < free_.size(); ++i) {
        if (best == free_.size()) {
          best = i;
          continue;
        }
        const std::size_t now = free_[best].bytes, other = free_[i].bytes;
        if (now >= bytes ? other >= bytes && other < now : other > now) best = i;
      }
      if (best < free_.size()) {
        std::swap(free_[best], free_.back());
        block = std::move(free_.back());
        free_.pop_back();
      } else {
        free_.reserve(++made_);  // so that give_back never allocates
      }
    }
    if (block.bytes >= bytes) return block;
    block.memory.reset();
    block.bytes = 0;
    try {
      block.memory.reset(new unsigned char[bytes]);
    } catch (...) {
      give_back(std::move(block));
      throw;
    }
    block.bytes = bytes;
    return block;
  }

  void give_back(Lease::Block block) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(block));
  }

  std::mutex mutex_;
  std::size_t made_ = 0;
  std::vector<Lease::Block> free_;
};

}  // namespace graphrot
