// The path for every machine: plain C++.
#include <cmath>
#include <cstring>

#include "attention/cache.h"

namespace graphrot {
namespace {

template <class T>
void load(const void* from, float* to, std::size_t count) {
  const auto* elements = static_cast<const T*>(from);
  for (std::size_t i = 0; i < count; ++i) to[i] = to_float(elements[i]);
}

template <class T>
void save(const float* from, void* to, std::size_t count) {
  auto* elements = static_cast<T*>(to);
  for (std::size_t i = 0; i < count; ++i) from_float(from[i], elements + i);
}

constexpr std::uint16_t kNan = 0x7e00u, kLargest = 0x7bffu, kSign = 0x8000u, kInfinity = 0x7c00u;

Half saturated(float value) {
  Half half{};
  from_float(value, &half);
  if ((half.bits & ~kSign) == kInfinity) half.bits = static_cast<std::uint16_t>((half.bits & kSign) | kLargest);
  return half;
}

void put(std::uint8_t* to, Half half) {
  to[0] = static_cast<std::uint8_t>(half.bits & 0xffu);
  to[1] = static_cast<std::uint8_t>(half.bits >> 8);
}

unsigned code_of(float z, float base, float step, float levels) {
  const float quotient = (z - base) / step;
  // Clipped first, which keeps it in the range of an int.
  const float clipped = quotient > 0.0f ? (quotient < levels ? quotient : levels) : 0.0f;
  return static_cast<unsigned>(std::nearbyint(clipped));
}

void store(const CacheFormat& format, const float* z, std::uint8_t* row) {
  const std::size_t size = format.head_size, codes = code_bytes(format);
  float low = z[0], high = z[0];
  bool finite = true;
  for (std::size_t i = 0; i < size; ++i) {
    low = z[i] < low ? z[i] : low;
    high = z[i] > high ? z[i] : high;
    finite = finite && std::isfinite(z[i]);
  }
  if (!finite) {
    std::memset(row, 0, codes);
    put(row + codes, Half{0});
    put(row + codes + 2, Half{kNan});
    return;
  }
  low += 0.0f;  // no negative zeros
  const float levels = format.bits == 4 ? 15.0f : 255.0f;
  const Half step_bits = saturated((high - low + 0.0f) / levels), base_bits = saturated(low);
  const float step = to_float(step_bits), base = to_float(base_bits);
  put(row + codes, step_bits);
  put(row + codes + 2, base_bits);
  if (step == 0.0f) {
    std::memset(row, 0, codes);
    return;
  }
  for (std::size_t i = 0; i < codes; ++i) {
    unsigned byte = code_of(z[i], base, step, levels);
    if (format.bits == 4) byte |= code_of(z[i + codes], base, step, levels) << 4;
    row[i] = static_cast<std::uint8_t>(byte);
  }
}

constexpr CacheKernels kKernels = {{&load<float>, &load<Half>, &load<BFloat16>},
                                   {&save<float>, &save<Half>, &save<BFloat16>},
                                   &store};

}  // namespace

const CacheKernels& cache_scalar() { return kKernels; }

}  // namespace graphrot
