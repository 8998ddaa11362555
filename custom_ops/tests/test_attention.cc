// The whole operator without a runtime, on every path: its definition in double over what is stored; chunks as one, in
// place as grown, any number of threads, and working memory that does not grow with the cache.
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/attention_case.h"
#include "tests/attention_checks.h"
#include "tests/check.h"
#include "tests/counted.h"
#include "tests/parallel.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

template <class T>
void check_values(Isa isa, const AttentionCase<T>& c) {
  // In float, or with rounded queries and weights.
  const bool exact = attend_kernel(attend_problem(c.shape.format(), 1.0f, 0.0f), isa) == &attend_scalar;
  check_values(isa_name(isa), c, exact ? 2e-5 : 1e-4, exact ? 0 : 2);
}

template <class T>
void check_cache(Isa isa, const AttentionCase<T>& c) {
  check_cache(isa_name(isa), c, [&](std::vector<float>& z) {
    if (const auto rotation = c.shape.rotation()) {
      std::vector<float> scratch(rotation->scratch_floats() + 16);
      float* aligned = scratch.data();
      while (reinterpret_cast<std::uintptr_t>(aligned) % 64 != 0) ++aligned;
      hadamard_kernels(isa).run[0](rotation->problem(), z.data(), z.data(), 1, aligned);
    }
  });
}

template <class T>
void check(Isa isa, const AttentionShape& shape) {
  AttentionCase<T> c(shape);
  c.run(isa);
  check_cache(isa, c);
  check_values(isa, c);
}

void check_shapes(Isa isa) {
  for (const std::size_t size : {2, 6, 16, 24, 30, 32, 40, 62, 64, 80, 96, 128, 256, 320}) {
    for (const int bits : {4, 8}) {
      AttentionShape s;
      s.head_size = size;
      s.bits = bits;
      s.rotation_order = 0;
      s.group = 1 + size % 5;
      s.tokens = 2;
      s.past_slots = 33 + size % 7;
      s.seed = size;
      check<float>(isa, s);
    }
  }
  for (const std::size_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17}) {
    AttentionShape s;
    s.kv_heads = 1;
    s.group = group;
    s.past_slots = 300;
    check<float>(isa, s);
  }
  for (const std::size_t past : {0, 1, 14, 15, 16, 254, 255, 256, 1023, 1024, 2047, 8191}) {
    AttentionShape s;
    s.past_slots = past;
    s.bits = past % 2 == 0 ? 4 : 8;
    s.kv_heads = past > 2000 ? 1 : 2;
    check<float>(isa, s);
    check<Half>(isa, s);
  }
  for (const std::size_t tokens : {2, 5, 6, 7, 16, 40, 130}) {
    AttentionShape s;
    s.tokens = tokens;
    s.past_slots = tokens % 2 == 0 ? 0 : 250;
    check<float>(isa, s);
    check<BFloat16>(isa, s);
  }
  for (const std::size_t order : {12, 20}) {  // 96 and 80 channels
    AttentionShape s;
    s.head_size = order == 12 ? 96 : 80;
    s.rotation_order = order;
    s.past_slots = 20;
    s.tokens = 3;
    check<float>(isa, s);
  }
}

void check_meanings(Isa isa) {
  for (const int bits : {4, 8}) {
    AttentionShape s;
    s.bits = bits;
    s.past_slots = 400;
    s.tokens = 3;
    s.softcap = 2.0f;
    check<float>(isa, s);
    s.softcap = 0;
    for (const std::int64_t window : {0, 1, 17, 300, 1000}) {
      s.window = window;
      s.causal = true;
      check<float>(isa, s);
      s.causal = false;
      check<float>(isa, s);
    }
    s.window = -1;
    check<float>(isa, s);
    s.masked = true;
    s.batch = 2;
    for (int which = 0; which < 4; ++which) {
      s.mask_by_head = which % 2 == 1;
      s.mask_by_query = which / 2 == 1;
      s.causal = which == 0;
      check<float>(isa, s);
    }
    s.softcap = 3.0f;
    check<float>(isa, s);
  }
  AttentionShape s;  // prompts of several lengths, padded on the right
  s.batch = 3;
  s.tokens = 20;
  s.last_slots = {19, 3, 11};
  check<float>(isa, s);
  s.past_slots = 600;  // decoding behind them, in a buffer with room
  s.tokens = 1;
  s.last_slots = {512, 3, 255};
  check<float>(isa, s);
  s.total = 700;
  check<float>(isa, s);
  s.last_slots = {-1, 0, 699};
  check<float>(isa, s);
}

// Left padding: what the mask hides may be anything.
void check_hidden(Isa isa) {
  AttentionShape s;
  s.batch = 3;
  s.past_slots = 300;
  s.masked = true;
  AttentionCase<float> c(s);
  const std::size_t hidden[] = {0, 7, 290};
  for (std::size_t b = 0; b < 3; ++b) {
    for (std::size_t j = 0; j < c.used(); ++j) c.mask[b * c.used() + j] = j < hidden[b] ? -3.4e38f : 0.0f;
  }
  c.run(isa);
  check_values(isa, c);
  AttentionCase<float> other = c;
  for (std::size_t b = 0; b < 3; ++b) {
    for (std::size_t h = 0; h < s.kv_heads; ++h) {
      const auto at = static_cast<std::ptrdiff_t>((b * s.kv_heads + h) * s.past_slots * s.row());
      const auto count = static_cast<std::ptrdiff_t>(hidden[b] * s.row());
      std::fill_n(other.past_key.begin() + at, count, std::uint8_t{0xff});
      std::fill_n(other.past_value.begin() + at, count, std::uint8_t{0xff});
    }
  }
  other.refresh();
  other.run(isa);
  EXPECT(c.output == other.output, "%s: hidden rows count for nothing", isa_name(isa));
  for (float& each : c.mask) each = -2e30f;
  c.run(isa);
  EXPECT(c.output == std::vector<float>(c.output.size(), 0.0f), "%s: nothing to see gives zeros", isa_name(isa));
}

// Behind the slots in use, a buffer may hold anything.
void check_in_place(Isa isa) {
  for (const int bits : {4, 8}) {
    AttentionShape s;
    s.bits = bits;
    s.batch = 2;
    s.tokens = 5;
    s.past_slots = 261;
    AttentionCase<float> grown(s), fixed(s);
    grown.run(isa);
    fixed.shape.past_slots = 290;
    fixed.shape.last_slots.assign(2, 265);
    fixed.present_key.assign(2 * s.kv_heads * 290 * s.row(), 0xff);
    fixed.present_value = fixed.present_key;
    const auto row = static_cast<std::ptrdiff_t>(s.row());
    for (std::ptrdiff_t place = 0; place < 4; ++place) {
      std::copy_n(grown.past_key.begin() + place * 261 * row, 261 * row, fixed.present_key.begin() + place * 290 * row);
      std::copy_n(grown.past_value.begin() + place * 261 * row, 261 * row,
                  fixed.present_value.begin() + place * 290 * row);
    }
    fixed.in_place();
    fixed.run(isa);
    EXPECT(grown.output == fixed.output, "%s, %d bits: in place as grown", isa_name(isa), bits);
    for (std::ptrdiff_t place = 0; place < 4; ++place) {
      const auto same = [&](const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b) {
        return std::equal(a.begin() + place * 266 * row, a.begin() + (place + 1) * 266 * row,
                          b.begin() + place * 290 * row);
      };
      EXPECT(same(grown.present_key, fixed.past_key), "%s: keys of %td", isa_name(isa), place);
      EXPECT(same(grown.present_value, fixed.past_value), "%s: values of %td", isa_name(isa), place);
    }
  }
}

void check_threads(Isa isa) {
  for (const std::size_t tokens : {1, 3, 60}) {
    AttentionShape s;
    s.tokens = tokens;
    s.past_slots = 2100;
    AttentionCase<float> c(s), other(s), third(s);
    c.run(isa);
    other.run(isa, backwards);
    third.run(isa, on_three_threads);
    EXPECT(c.output == other.output && c.present_key == other.present_key, "%s: tasks backwards", isa_name(isa));
    EXPECT(c.output == third.output && c.present_value == third.present_value, "%s: three threads", isa_name(isa));
  }
}

// Chunks of many queries give the same bits; of few, whose slots are cut in runs, the same numbers.
void check_chunks(Isa isa) {
  for (const std::size_t step : {1, 7, 100}) {
    AttentionShape s;
    s.kv_heads = 1;
    s.tokens = step == 1 ? 1300 : 600;
    s.causal = true;
    AttentionCase<float> all(s);
    all.run(isa);
    std::vector<float> output;
    std::vector<std::uint8_t> keys, values;
    const std::size_t first = step == 1 ? 1295 : 0;
    for (std::size_t at = 0; at < s.tokens;) {
      const std::size_t count = std::min(at < first ? first : step, s.tokens - at);
      AttentionShape part = s;
      part.tokens = count;
      part.past_slots = at;
      AttentionCase<float> c(part);
      const auto cut = [&](const std::vector<float>& from, std::size_t heads) {
        const std::size_t width = heads * s.head_size;
        return std::vector<float>(from.begin() + static_cast<std::ptrdiff_t>(at * width),
                                  from.begin() + static_cast<std::ptrdiff_t>((at + count) * width));
      };
      c.query = cut(all.query, s.heads());
      c.key = cut(all.key, 1);
      c.value = cut(all.value, 1);
      c.past_key = keys;
      c.past_value = values;
      c.refresh();
      c.run(isa);
      keys = c.present_key;
      values = c.present_value;
      output.insert(output.end(), c.output.begin(), c.output.end());
      at += count;
    }
    EXPECT(keys == all.present_key && values == all.present_value, "%s: rows in chunks of %zu", isa_name(isa), step);
    float most = 0;
    for (std::size_t i = 0; i < output.size(); ++i) most = std::fmax(most, std::fabs(output[i] - all.output[i]));
    EXPECT(step == 1 ? most < 1e-5f : most == 0, "%s: in chunks of %zu, %g apart", isa_name(isa), step,
           static_cast<double>(most));
  }
}

void check_not_finite(Isa isa) {
  AttentionShape s;
  s.tokens = 8;
  s.past_slots = 12;
  s.rotation_order = 0;
  check_spoiled(
      isa_name(isa), s, [&](auto& c) { c.run(isa); }, [&](const auto& c) { check_cache(isa, c); });
  AttentionCase<float> c(s);
  c.query[(3 * s.heads() + 2) * s.head_size] = std::nanf("");
  c.run(isa);
  for (std::size_t i = 0; i < c.output.size(); ++i) {
    EXPECT(std::isnan(c.output[i]) == (i / s.head_size == 3 * s.heads() + 2), "%s: value %zu", isa_name(isa), i);
  }
  AttentionShape alone;  // nothing but NaN to see
  AttentionCase<float> one(alone);
  one.key.assign(one.key.size(), std::nanf(""));
  one.run(isa);
  for (const float value : one.output) EXPECT(std::isnan(value), "%s: NaN alone", isa_name(isa));
}

std::size_t memory_of(Isa isa, std::size_t tokens, std::size_t past) {
  AttentionShape s;
  s.tokens = tokens;
  s.past_slots = past;
  AttentionCase<float> c(s);
  const Attention attention(s.form(), s.rotation(), Element::kFloat, isa);
  const std::size_t before = live_bytes;
  most_bytes = before;
  ScratchPool pool;
  attention.run(c.call, pool, in_order);
  return most_bytes - before;
}

void check_memory(Isa isa) {
  for (const std::size_t tokens : {1, 30}) {
    const std::size_t few = memory_of(isa, tokens, 300), many = memory_of(isa, tokens, 20000);
    EXPECT(few == many, "%s: %zu bytes for 300 slots, %zu for 20000", isa_name(isa), few, many);
    EXPECT(few < 300000, "%s: %zu bytes", isa_name(isa), few);
  }
}

template <class Body>
void refuses(const char* text, const Body& body) {
  bool refused = false;
  try {
    body();
  } catch (const std::invalid_argument& error) {
    refused = std::strstr(error.what(), text) != nullptr;
  }
  EXPECT(refused, "refused in words: %s", text);
}

void check_refusals() {
  const auto form = [](auto change) {
    AttentionForm f = AttentionShape().form();
    change(f);
    Attention(f, AttentionShape().rotation(), Element::kFloat, Isa::kScalar);
  };
  refuses("no multiple of 'kv_num_heads' 2", [&] { form([](AttentionForm& f) { f.heads = 5; }); });
  refuses("'head_size' is 7", [&] { form([](AttentionForm& f) { f.format.head_size = 7; }); });
  refuses("'bits' is 5", [&] { form([](AttentionForm& f) { f.format.bits = 5; }); });
  refuses("'softcap'", [&] { form([](AttentionForm& f) { f.softcap = -1; }); });
  refuses("'score_scale'", [&] { form([](AttentionForm& f) { f.score_scale = std::nanf(""); }); });
  refuses("'local_window_size' is -2", [&] { form([](AttentionForm& f) { f.window = -2; }); });
  refuses("no multiple of the transform's size 64", [&] { form([](AttentionForm& f) { f.format.head_size = 96; }); });
  const auto call = [](std::vector<std::int32_t> lasts, std::size_t mask_slots) {
    AttentionShape s;
    s.tokens = 4;
    s.past_slots = 10;
    s.total = 12;
    s.last_slots = {11};
    AttentionCase<float> c(s);
    const std::vector<float> mask(12);
    c.call.last_slots = lasts.data();
    if (mask_slots != 0) c.call.mask = {mask.data(), 0, 0, 0, mask_slots};
    check_attention_call(c.call);
  };
  refuses("'seqlens_k' is 12 for row 0", [&] { call({12}, 0); });
  refuses("'seqlens_k' is -2 for row 0", [&] { call({-2}, 0); });
  refuses("'mask' has 11 slots", [&] { call({11}, 11); });
  refuses("too few for 4 new tokens", [] {
    AttentionShape s;
    s.tokens = 4;
    s.total = 3;
    s.last_slots = {2};
    check_attention_call(AttentionCase<float>(s).call);
  });
}

}  // namespace

int main() {
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) {
      std::printf("NOT RUN: attention, %s\n", isa_name(isa));
      continue;
    }
    check_shapes(isa);
    check_meanings(isa);
    check_hidden(isa);
    check_in_place(isa);
    check_threads(isa);
    check_chunks(isa);
    check_not_finite(isa);
    check_memory(isa);
  }
  check_refusals();
  return test::failures == 0 ? 0 : 1;
}
