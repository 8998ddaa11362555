// The packed layout against the storage of MatMulNBits, code by code, and what is refused.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "matmul/weights.h"
#include "tests/check.h"
#include "tests/product_case.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

unsigned code_at(const ProductProblem& p, std::size_t n, std::size_t k) {
  const std::size_t per_unit = p.bits == 4 ? 8 : 4, column = n % kTileColumns;
  const std::uint8_t* unit = p.codes + (n / kTileColumns * p.units + k / per_unit) * kUnitBytes;
  const unsigned byte = unit[column / 16 * 64 + column % 16 * 4 + k % 4];
  if (p.bits == 8) return byte;
  return k % 8 < 4 ? byte & 15u : byte >> 4;
}

void layout() {
  for (const int bits : {4, 8}) {
    for (const std::size_t channels : {1, 7, 20, 96, 100}) {
      for (const std::size_t group : {channels, std::size_t{32}}) {
        const std::size_t block = group == channels ? 16 : group;
        const Case c({1, channels, 70, group, block, bits, true, true, Values::kRandom});
        const ProductWeights weights(c.source(70));
        const ProductProblem& p = weights.problem();
        EXPECT(p.tiles == 2 && p.groups == c.groups && p.units == (channels + 7) / 8 * (bits == 4 ? 1u : 2u), "sizes");
        EXPECT(reinterpret_cast<std::uintptr_t>(p.codes) % 64 == 0, "codes are aligned");
        for (std::size_t n = 0; n < 70; ++n) {
          for (std::size_t k = 0; k < channels; ++k) {
            EXPECT(code_at(p, n, k) == c.weights[n * channels + k], "bits %d, code [%zu, %zu]", bits, n, k);
          }
          for (std::size_t g = 0; g < p.groups; ++g) {
            const std::size_t at = (n / 64 * p.groups + g) * 64 + n % 64;
            EXPECT(p.scales[at] == c.scales[n * p.groups + g] && p.zeros[at] == c.zeros[n * p.groups + g],
                   "bits %d, group [%zu, %zu]", bits, n, g);
          }
          EXPECT(p.bias[n] == c.bias[n], "bias %zu", n);
        }
      }
    }
  }
}

void refused(std::size_t channels, std::size_t columns, std::size_t group, std::size_t block, int bits,
             const char* words) {
  std::string message;
  try {
    ProductWeights weights({channels, columns, group, block, bits, nullptr, nullptr, nullptr, nullptr});
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  EXPECT(message.find(words) != std::string::npos, "expected '%s', got '%s'", words, message.c_str());
}

void wrong_numbers_are_refused() {
  refused(64, 64, 64, 64, 5, "'bits' is 5");
  refused(0, 64, 0, 64, 4, "'K' and 'N'");
  refused(64, 0, 64, 64, 4, "'K' and 'N'");
  refused(64, 64, 64, 24, 4, "'block' is 24");
  refused(64, 64, 64, 8, 8, "'block' is 8");
  refused(512, 64, 256, 256, 4, "every 256 channels");
  refused(512, 64, 64, 32, 4, "every 64 channels");
  refused(512, 64, 16, 16, 4, "every 16 channels");
  refused(65537, 64, 65537, 64, 8, "do not fit into 32 bits");
}

}  // namespace

int main() {
  layout();
  wrong_numbers_are_refused();
  return test::failures == 0 ? 0 : 1;
}
