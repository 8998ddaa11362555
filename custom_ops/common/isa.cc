#include "common/isa.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(_MSC_VER) && defined(GRAPHROT_HAVE_AVX2)
#include <intrin.h>
#elif defined(GRAPHROT_HAVE_AVX2)
#include <cpuid.h>
#endif

namespace graphrot {
namespace {

constexpr Isa kAll[] = {Isa::kAvx2, Isa::kScalar};  // best first

#if defined(GRAPHROT_HAVE_AVX2)

struct Registers {
  std::uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(std::uint32_t leaf) {
  Registers r{};
#if defined(_MSC_VER)
  int raw[4];
  __cpuidex(raw, static_cast<int>(leaf), 0);
  r = {static_cast<std::uint32_t>(raw[0]), static_cast<std::uint32_t>(raw[1]), static_cast<std::uint32_t>(raw[2]),
       static_cast<std::uint32_t>(raw[3])};
#else
  __cpuid_count(leaf, 0, r.eax, r.ebx, r.ecx, r.edx);
#endif
  return r;
}

std::uint64_t enabled_state() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
#endif
}

bool machine_has_avx2() {
  if (cpuid(0).eax < 7) return false;
  constexpr std::uint32_t kFma = 1u << 12, kOsXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr std::uint32_t kNeeded = kFma | kOsXsave | kAvx | kF16c;
  if ((cpuid(1).ecx & kNeeded) != kNeeded) return false;
  constexpr std::uint64_t kXmmYmm = 6;
  if ((enabled_state() & kXmmYmm) != kXmmYmm) return false;
  return (cpuid(7).ebx & (1u << 5)) != 0;
}

#else

bool machine_has_avx2() { return false; }

#endif

}  // namespace

const char* isa_name(Isa isa) { return isa == Isa::kAvx2 ? "avx2" : "scalar"; }

bool isa_available(Isa isa) {
  static const bool avx2 = machine_has_avx2();
  return isa == Isa::kScalar || avx2;
}

Isa selected_isa() {
  const char* wanted = std::getenv("GRAPHROT_ISA");
  const bool automatic = wanted == nullptr || *wanted == '\0';
  for (const Isa isa : kAll) {
    if (automatic ? isa_available(isa) : std::string(wanted) == isa_name(isa)) {
      if (isa_available(isa)) return isa;
      throw std::invalid_argument("GRAPHROT_ISA=" + std::string(wanted) + " is not available on this machine");
    }
  }
  throw std::invalid_argument("GRAPHROT_ISA=" + std::string(wanted) + " is unknown; use scalar or avx2");
}

}  // namespace graphrot
