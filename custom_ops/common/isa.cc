#include "common/isa.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if GRAPHROT_X86 && defined(_MSC_VER)
#include <intrin.h>
#elif GRAPHROT_X86
#include <cpuid.h>
#endif

#if GRAPHROT_X86 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace graphrot {
namespace {

#if GRAPHROT_X86

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

// The system hands the large tile registers to processes that ask, once, for all their threads.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;  // untried on other systems
#endif
}

struct Machine {
  bool avx2 = false;
  bool avx512 = false;
  bool vnni = false;
  bool amx = false;
};

// What the processor has and the operating system keeps for every thread.
Machine machine() {
  Machine found;
  if (cpuid(0).eax < 7) return found;
  constexpr std::uint32_t kFma = 1u << 12, kOsXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr std::uint32_t kNeeded = kFma | kOsXsave | kAvx | kF16c;
  if ((cpuid(1).ecx & kNeeded) != kNeeded) return found;
  const Registers features = cpuid(7);
  const std::uint32_t extended = features.ebx;
  std::uint64_t state = enabled_state();
#if defined(__APPLE__)
  // macOS keeps these registers from a thread's first use on, and shows them enabled only then.
  if ((extended & (1u << 16)) != 0) state |= 0xe0;
#endif
  constexpr std::uint64_t kXmmYmm = 0x06, kMasksZmm = 0xe0;
  if ((state & kXmmYmm) != kXmmYmm) return found;
  found.avx2 = (extended & (1u << 5)) != 0;
  constexpr std::uint32_t kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr std::uint32_t kAvx512 = kF | kDq | kBw | kVl;
  found.avx512 = found.avx2 && (extended & kAvx512) == kAvx512 && (state & kMasksZmm) == kMasksZmm;
  constexpr std::uint32_t kVnni = 1u << 11;
  found.vnni = found.avx512 && (features.ecx & kVnni) != 0;
  constexpr std::uint32_t kTile = 1u << 24, kTileInt8 = 1u << 25;
  constexpr std::uint32_t kAmx = kTile | kTileInt8;
  constexpr std::uint64_t kTileState = 0x60000;
  found.amx = found.vnni && (features.edx & kAmx) == kAmx && (state & kTileState) == kTileState && may_use_tiles();
  return found;
}

bool machine_has(Isa isa) {
  static const Machine found = machine();
  switch (isa) {
    case Isa::kAmx: return found.amx;
    case Isa::kVnni: return found.vnni;
    case Isa::kAvx512: return found.avx512;
    case Isa::kAvx2: return found.avx2;
    default: return true;
  }
}

#else

bool machine_has(Isa isa) { return isa == Isa::kScalar; }

#endif

std::string known_names() {
  std::string names;
  for (const Isa isa : kIsas) names += std::string(names.empty() ? "" : ", ") + isa_name(isa);
  return names;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAmx: return "amx";
    case Isa::kVnni: return "avx512vnni";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    default: return "scalar";
  }
}

bool isa_built(Isa isa) { return isa == Isa::kScalar || GRAPHROT_X86 != 0; }

bool isa_available(Isa isa) { return isa_built(isa) && machine_has(isa); }

Isa selected_isa() {
  const char* wanted = std::getenv("GRAPHROT_ISA");
  const bool automatic = wanted == nullptr || *wanted == '\0';
  for (const Isa isa : kIsas) {
    if (automatic ? isa_available(isa) : std::string(wanted) == isa_name(isa)) {
      if (isa_available(isa)) return isa;
      throw std::invalid_argument("GRAPHROT_ISA=" + std::string(wanted) + " is not available on this machine");
    }
  }
  throw std::invalid_argument("GRAPHROT_ISA=" + std::string(wanted) + " is unknown; use one of " + known_names());
}

}  // namespace graphrot
