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
  EXPECT(selected_isa() == (isa_available(Isa::kAvx2) ? Isa::kAvx2 : Isa::kScalar), "the best path is the default");
  set("scalar");
  EXPECT(selected_isa() == Isa::kScalar, "scalar can always be chosen");
  EXPECT(isa_available(Isa::kScalar), "scalar is always there");
  for (const char* name : {"avx2", "neon9"}) {
    if (std::strcmp(name, "avx2") == 0 && isa_available(Isa::kAvx2)) continue;
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
