#include "attention/attend.h"

namespace graphrot {

AttendRun attend_kernel(const CacheFormat& format, Isa isa) {
  (void)format;
  (void)isa;
  return &attend_scalar;
}

std::size_t attend_scratch_bytes(const CacheFormat& format, std::size_t queries) {
  return (format.head_size + kMostQueries + queries * kBlockSlots) * sizeof(float);
}

}  // namespace graphrot
