// The path for every machine: plain C++, float arithmetic.
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/attend.h"

namespace graphrot {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Row {
  float step, base;
};

Half half_at(const std::uint8_t* from) { return Half{static_cast<std::uint16_t>(from[0] | from[1] << 8)}; }

Row unpack(const CacheFormat& format, const std::uint8_t* row, float* codes) {
  const std::size_t count = code_bytes(format);
  for (std::size_t i = 0; i < count; ++i) {
    if (format.bits == 4) {
      codes[i] = static_cast<float>(row[i] & 15);
      codes[i + count] = static_cast<float>(row[i] >> 4);
    } else {
      codes[i] = static_cast<float>(row[i]);
    }
  }
  return {to_float(half_at(row + count)), to_float(half_at(row + count + 2))};
}

// Eight sums side by side, for compilers that may not reorder one.
float dot(const float* a, const float* b, std::size_t count) {
  float sums[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

float score(const AttendProblem& problem, const AttendQuery& query, std::size_t slot, float product) {
  if (slot < query.first || slot >= query.last) return kNone;
  const float mask = query.mask != nullptr ? query.mask[slot] : 0.0f;
  if (!(mask > kHidden)) return kNone;
  float value = problem.score_scale * product;
  if (problem.softcap > 0.0f) value = problem.softcap * std::tanh(value / problem.softcap);
  return value + mask;
}

}  // namespace

void attend_scalar(const AttendProblem& problem, const AttendTask& task, void* scratch) {
  const CacheFormat& format = problem.format;
  const std::size_t size = format.head_size, bytes = problem.row_bytes;
  auto* const memory = static_cast<unsigned char*>(scratch);
  auto* const codes = reinterpret_cast<float*>(memory + problem.scratch.codes);
  auto* const query_sums = reinterpret_cast<float*>(memory + problem.scratch.rows);
  auto* const scores = reinterpret_cast<float*>(memory + problem.scratch.scores);  // [count][kBlockSlots]
  for (std::size_t q = 0; q < task.count; ++q) {
    query_sums[q] = 0.0f;
    for (std::size_t i = 0; i < size; ++i) query_sums[q] += task.queries[q].query[i];
    task.largest[q] = kNone;
    task.total[q] = 0.0f;
  }
  std::memset(task.sums, 0, task.count * size * sizeof(float));
  for (std::size_t start = task.first; start < task.last; start += kBlockSlots) {
    const std::size_t count = task.last - start < kBlockSlots ? task.last - start : kBlockSlots;
    for (std::size_t j = 0; j < count; ++j) {
      const Row row = unpack(format, task.keys + (start + j) * bytes, codes);
      for (std::size_t q = 0; q < task.count; ++q) {
        const float product = row.step * dot(task.queries[q].query, codes, size) + row.base * query_sums[q];
        scores[q * kBlockSlots + j] = score(problem, task.queries[q], start + j, product);
      }
    }
    for (std::size_t q = 0; q < task.count; ++q) {  // scores become weights
      float* const row = scores + q * kBlockSlots;
      float largest = task.largest[q];
      for (std::size_t j = 0; j < count; ++j) largest = row[j] > largest ? row[j] : largest;
      const float keep = task.largest[q] == kNone ? 0.0f : std::exp(task.largest[q] - largest);
      task.largest[q] = largest;
      float total = 0.0f;
      for (std::size_t j = 0; j < count; ++j) {
        row[j] = row[j] == kNone ? 0.0f : std::exp(row[j] - largest);
        total += row[j];
      }
      task.total[q] = task.total[q] * keep + total;
      for (std::size_t i = 0; i < size; ++i) task.sums[q * size + i] *= keep;
    }
    for (std::size_t j = 0; j < count; ++j) {
      const Row row = unpack(format, task.values + (start + j) * bytes, codes);
      for (std::size_t q = 0; q < task.count; ++q) {
        const float weight = scores[q * kBlockSlots + j];
        if (weight == 0.0f) continue;  // what is hidden may be NaN
        const float step = weight * row.step, base = weight * row.base;
        float* const sums = task.sums + q * size;
        for (std::size_t i = 0; i < size; ++i) sums[i] += step * codes[i] + base;
      }
    }
  }
}

}  // namespace graphrot
