// A call of attention through its CUDA kernels on the CPU, with all of its memory guarded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention_cuda.h"
#include "common/cuda/device.cuh"
#include "tests/attention_case.h"
#include "tests/attention_checks.h"
#include "tests/check.h"

namespace graphrot::test {

inline constexpr char kWho[] = "CUDA";
// Of the largest value, beside what rounding queries and weights to 2^-15 of their largest costs.
inline constexpr double kRelative = 6e-5, kSpreads = 2;

inline void set_multiprocessors(int count) { shim::set_device({9, 0, count, 227 * 1024}); }

// The transform's problem with its factor.
struct Rotation {
  std::unique_ptr<HadamardTransform> transform;
  std::vector<std::uint8_t> factor;
  CudaHadamard problem{};

  explicit Rotation(const AttentionShape& s) : transform(s.rotation()) {
    if (transform == nullptr) return;
    factor = cuda_factor(s.rotation_order, hadamard(s.rotation_order));
    problem = cuda_hadamard(transform->problem(), factor.empty() ? nullptr : factor.data());
  }
  const CudaHadamard* get() const { return transform == nullptr ? nullptr : &problem; }
};

// Runs the call with all of its memory in guarded buffers, and takes the results back. `skip`: words before the caches.
template <class T>
void run(AttentionCase<T>& c, std::size_t skip = 0) {
  const AttentionShape& s = c.shape;
  const Rotation rotation(s);
  shim::Guarded<T> query(c.query), key(c.key), value(c.value), output(c.output.size());
  const auto moved = [skip](const std::vector<std::uint8_t>& rows) {
    std::vector<std::uint8_t> bytes(4 * skip, 0xff);
    bytes.insert(bytes.end(), rows.begin(), rows.end());
    return bytes;
  };
  const bool in_place = c.call.past_key == c.call.present_key;
  const std::vector<std::uint8_t> none;
  shim::Guarded<std::uint8_t> past_key(moved(c.past_key)), past_value(moved(c.past_value));
  shim::Guarded<std::uint8_t> present_key(moved(in_place ? none : c.present_key));
  shim::Guarded<std::uint8_t> present_value(moved(in_place ? none : c.present_value));
  shim::Guarded<std::int32_t> lasts(s.lasts());
  shim::Guarded<float> mask(c.mask);
  AttentionCall call = c.call;
  call.query = query.data();
  call.key = key.data();
  call.value = value.data();
  call.past_key = past_key.data() + 4 * skip;
  call.past_value = past_value.data() + 4 * skip;
  call.present_key = (in_place ? past_key : present_key).data() + 4 * skip;
  call.present_value = (in_place ? past_value : present_value).data() + 4 * skip;
  call.last_slots = lasts.data();
  if (call.mask.data != nullptr) call.mask.data = mask.data();
  call.output = output.data();
  shim::Guarded<std::uint8_t> scratch(attention_cuda_scratch_bytes(s.form(), call));
  attention_cuda(s.form(), rotation.get(), Kind<T>::element, call, scratch.data(), nullptr);
  EXPECT(query.kept() && key.kept() && value.kept() && output.kept() && past_key.kept() && past_value.kept() &&
             present_key.kept() && present_value.kept() && lasts.kept() && mask.kept() && scratch.kept(),
         "%s: something beside a buffer was written", words(s).c_str());
  const auto back = [skip](const shim::Guarded<std::uint8_t>& from, std::vector<std::uint8_t>& to) {
    std::copy_n(from.data() + 4 * skip, to.size(), to.begin());
  };
  std::copy_n(output.data(), c.output.size(), c.output.begin());
  back(past_key, c.past_key);
  back(past_value, c.past_value);
  if (in_place) return;
  back(present_key, c.present_key);
  back(present_value, c.present_value);
}

template <class T>
void check_rows(const AttentionCase<T>& c) {
  const Rotation rotation(c.shape);
  check_cache(kWho, c, [&](std::vector<float>& z) {
    if (rotation.get() == nullptr) return;
    shim::Guarded<float> floats(z);
    hadamard_cuda(rotation.problem, Element::kFloat, floats.data(), floats.data(), 1, nullptr);
    std::copy_n(floats.data(), z.size(), z.begin());
  });
}

template <class T>
void check(const AttentionShape& shape, std::size_t skip = 0) {
  AttentionCase<T> c(shape);
  run(c, skip);
  check_rows(c);
  check_values(kWho, c, kRelative, kSpreads);
}

}  // namespace graphrot::test
