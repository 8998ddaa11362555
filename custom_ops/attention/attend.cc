#include "attention/attend.h"

namespace graphrot {
namespace {

constexpr std::size_t kLine = 64;

}  // namespace

AttendProblem attend_problem(const CacheFormat& format, float score_scale, float softcap) {
  AttendProblem problem{};
  problem.format = format;
  problem.score_scale = score_scale;
  problem.softcap = softcap;
  problem.row_bytes = row_bytes(format);
  problem.code_bytes = code_bytes(format);
  problem.pieces = (problem.code_bytes + kPieceBytes - 1) / kPieceBytes;
  problem.channels = problem.pieces * kPieceBytes * (format.bits == 4 ? 2 : 1);

  std::size_t end = 0;
  const auto part = [&end](std::size_t bytes) {
    const std::size_t start = end;
    end += (bytes + kLine - 1) / kLine * kLine;
    return start;
  };
  auto& scratch = problem.scratch;
  scratch.codes = part(kBlockSlots * problem.channels);  // a block of keys or values, unpacked
  scratch.scores = part(kMostQueries * kBlockSlots * sizeof(float));  // then weights
  scratch.queries = part(kMostQueries * problem.channels * 2);  // 16-bit numbers
  scratch.weights = part(kMostQueries * kBlockSlots * 2);  // likewise
  scratch.sums = part(kMostQueries * problem.channels * sizeof(float));  // weighted values so far
  scratch.rows = part(kMostQueries * kRowNumbers * sizeof(float));  // of each query
  scratch.scales = part(kScaleNumbers * kBlockSlots * sizeof(float));  // of each slot
  scratch.tail = part(kTailSlots * problem.row_bytes);
  scratch.bytes = end;
  return problem;
}

AttendRun attend_kernel([[maybe_unused]] const AttendProblem& problem, [[maybe_unused]] Isa isa) {
#if GRAPHROT_X86
  if (problem.code_bytes >= kPieceBytes && problem.format.head_size <= kWidestHead) {
    if (isa >= Isa::kVnni) return &attend_vnni;
    if (isa == Isa::kAvx512) return &attend_avx512;
    if (isa == Isa::kAvx2) return &attend_avx2;
  }
#endif
  return &attend_scalar;
}

}  // namespace graphrot
