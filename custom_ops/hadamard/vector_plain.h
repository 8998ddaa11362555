// Eight floats at a time in plain C++, as panel.h wants them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/element.h"

namespace graphrot {
namespace {

struct Plain {
  static constexpr int kLevels = 3;
  static constexpr int kChunk = 3;
  static constexpr bool kSingles = true;  // one() and put() exist
  static constexpr std::size_t kWidth = std::size_t{1} << kLevels;

  float lane[kWidth];

  template <class T>
  static Plain load(const T* from) {
    Plain v;
    for (std::size_t i = 0; i < kWidth; ++i) v.lane[i] = to_float(from[i]);
    return v;
  }

  template <class T>
  void store(T* to) const {
    for (std::size_t i = 0; i < kWidth; ++i) from_float(lane[i], to + i);
  }

  static Plain broadcast(float value) {
    Plain v;
    for (float& x : v.lane) x = value;
    return v;
  }

  static Plain multiply_add(const Plain& a, const Plain& b, const Plain& c) {
    Plain v;
    for (std::size_t i = 0; i < kWidth; ++i) v.lane[i] = c.lane[i] + a.lane[i] * b.lane[i];
    return v;
  }

  template <class T>
  static float one(T value) {
    return to_float(value);
  }

  template <class T>
  static void put(float value, T* to) {
    from_float(value, to);
  }

  template <std::size_t Stride>
  Plain butterfly() const {
    Plain v;
    for (std::size_t i = 0; i < kWidth; ++i) {
      v.lane[i] = (i & Stride) != 0 ? lane[i ^ Stride] - lane[i] : lane[i] + lane[i ^ Stride];
    }
    return v;
  }

  friend Plain operator+(const Plain& a, const Plain& b) {
    Plain v;
    for (std::size_t i = 0; i < kWidth; ++i) v.lane[i] = a.lane[i] + b.lane[i];
    return v;
  }

  friend Plain operator-(const Plain& a, const Plain& b) {
    Plain v;
    for (std::size_t i = 0; i < kWidth; ++i) v.lane[i] = a.lane[i] - b.lane[i];
    return v;
  }

  friend Plain operator*(const Plain& a, const Plain& b) {
    Plain v;
    for (std::size_t i = 0; i < kWidth; ++i) v.lane[i] = a.lane[i] * b.lane[i];
    return v;
  }

  // The largest magnitude by its bits: as whole numbers, infinity is above all others and NaN above infinity.
  struct Peak {
    std::uint32_t bits[kWidth] = {};

    void add(const Plain& x) {
      for (std::size_t i = 0; i < kWidth; ++i) {
        const std::uint32_t magnitude = detail::float_bits(x.lane[i]) & 0x7fffffffu;
        bits[i] = magnitude > bits[i] ? magnitude : bits[i];
      }
    }

    std::uint32_t largest() const {
      std::uint32_t most = 0;
      for (const std::uint32_t each : bits) most = each > most ? each : most;
      return most;
    }
  };
};

}  // namespace
}  // namespace graphrot
