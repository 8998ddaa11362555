// Numbers that look random and are the same on every machine.
#pragma once

#include <cstdint>

namespace graphrot::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}

  std::uint32_t below(std::uint32_t limit) {
    step();
    return static_cast<std::uint32_t>((state_ >> 33) % limit);
  }

  float between(float low, float high) {
    return low + (high - low) * static_cast<float>(below(1u << 20)) / static_cast<float>(1u << 20);
  }

  double next() {  // about normal
    double sum = 0;
    for (int i = 0; i < 4; ++i) {
      step();
      sum += static_cast<double>(state_ >> 40) / static_cast<double>(1 << 24) - 0.5;
    }
    return 1.7 * sum;
  }

 private:
  void step() { state_ = state_ * 6364136223846793005u + 1442695040888963407u; }

  std::uint64_t state_;
};

}  // namespace graphrot::test
