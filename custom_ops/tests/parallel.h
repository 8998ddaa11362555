// Ways to run the tasks that a kernel hands out: none of them may change its results.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace graphrot::test {

inline const auto in_order = [](std::size_t count, const auto& task) {
  for (std::size_t i = 0; i < count; ++i) task(i);
};
inline const auto backwards = [](std::size_t count, const auto& task) {
  for (std::size_t i = count; i-- > 0;) task(i);
};
inline const auto on_three_threads = [](std::size_t count, const auto& task) {
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < count; i = next++) task(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
};

}  // namespace graphrot::test
