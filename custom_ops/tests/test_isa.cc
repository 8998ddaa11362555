// The choice of the instruction set: by the machine, by the environment, and in words when impossible.
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <stdexcept>

#include "common/isa.h"
#include "tests/check.h"

namespace {

void set(const char* value) {
#if defined(_WIN32)
  _putenv_s("GRAPHROT_ISA", value);
#else
  setenv("GRAPHROT_ISA", value, 1);
#endif
}

}  // namespace

int main() {
  using namespace graphrot;
  set("");
  Isa best = Isa::kScalar;
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kVnni, Isa::kAmx}) {
    if (isa_available(isa)) best = isa;
  }
  EXPECT(selected_isa() == best, "the best path is the default");
  EXPECT(isa_available(Isa::kScalar) && isa_built(Isa::kScalar), "scalar is always there");
  EXPECT(isa_available(Isa::kAvx2) || !isa_available(Isa::kAvx512), "AVX-512 brings AVX2 along");
  EXPECT(isa_available(Isa::kAvx512) || !isa_available(Isa::kVnni), "VNNI brings AVX-512 along");
  EXPECT(isa_available(Isa::kVnni) || !isa_available(Isa::kAmx), "AMX brings VNNI along");
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) continue;
    EXPECT(isa_built(isa), "what is available was built");
    set(isa_name(isa));
    EXPECT(selected_isa() == isa, "%s can be chosen", isa_name(isa));
  }
  for (const char* name : {"amx", "avx512vnni", "avx512", "avx2", "neon9"}) {
    bool available = false;
    for (const Isa isa : kIsas) available = available || (isa_available(isa) && std::strcmp(name, isa_name(isa)) == 0);
    if (available) continue;
    set(name);
    bool refused = false;
    try {
      selected_isa();
    } catch (const std::invalid_argument& error) {
      refused = std::strstr(error.what(), name) != nullptr;
    }
    EXPECT(refused, "%s is refused by name", name);
  }
  return test::failures == 0 ? 0 : 1;
}
