// Attention's CUDA kernels on the CPU: the definition in double over what is stored, rows as the CPU's to the bit,
// lengths that only the device reads, chunks as one, and nothing written or read beside a buffer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/attention_cuda.h"
#include "cuda_on_cpu/tests/attention_run.h"
#include "tests/attention_case.h"
#include "tests/attention_checks.h"
#include "tests/check.h"

using namespace graphrot;
using namespace graphrot::test;

namespace {

// Every kernel: padded channels, bits, few and many queries, one run and several.
void check_sizes() {
  for (const std::size_t size : {16, 64, 80, 96, 112, 128, 208, 256}) {
    for (const int bits : {4, 8}) {
      AttentionShape s;
      s.head_size = size;
      s.bits = bits;
      s.kv_heads = 2;
      s.group = size == 64 ? 1 : 3;
      s.rotation_order = size == 80 ? 20 : size == 96 ? 12 : size == 112 ? 28 : size == 208 ? 52 : 1;
      s.past_slots = 70 + size % 9;
      s.seed = size;
      set_multiprocessors(1);
      check<float>(s);
      check<Half>(s);
      s.kv_heads = 1;
      s.tokens = 19;
      check<BFloat16>(s);
      set_multiprocessors(64);  // runs, where the slots are enough
      s.past_slots = 300;
      check<Half>(s);
      s.tokens = 1;
      s.past_slots = 530;
      check<float>(s);
    }
  }
}

// Devices whose blocks have least shared memory (sm_86) run every size, too.
void check_small_device() {
  for (const std::size_t size : {64, 128, 192, 256}) {
    for (const int bits : {4, 8}) {
      for (const std::size_t tokens : {1, 19}) {
        AttentionShape s;
        s.head_size = size;
        s.bits = bits;
        s.kv_heads = 1;
        s.group = 2;
        s.rotation_order = size == 192 ? 12 : 1;
        s.tokens = tokens;
        s.past_slots = 300;
        shim::set_device({8, 6, 16, 99 * 1024});
        check<Half>(s);
      }
    }
  }
  set_multiprocessors(2);
}

void check_edges() {
  for (const std::size_t past : {0, 1, 30, 31, 63, 64, 255, 256}) {
    for (const int bits : {4, 8}) {
      AttentionShape s;
      s.kv_heads = 1;
      s.group = 8;
      s.bits = bits;
      s.past_slots = past;
      check<Half>(s);
      if (past % 2 == 1) check<Half>(s, 1 + past % 3);  // caches that begin between 16-byte addresses
    }
  }
  for (const std::size_t group : {2, 9, 16, 17, 65}) {
    AttentionShape s;
    s.kv_heads = 1;
    s.group = group;
    s.past_slots = 100;
    check<float>(s);
  }
  AttentionShape s;  // few queries of more than a token, and a prompt over more than a tile
  s.kv_heads = 2;
  s.group = 2;
  s.tokens = 7;
  s.past_slots = 127;
  check<float>(s);
  s.kv_heads = 1;
  s.group = 1;
  s.tokens = 140;
  s.past_slots = 0;
  check<Half>(s);
}

void check_meanings() {
  for (const std::size_t tokens : {3, 24}) {
    AttentionShape s;
    s.kv_heads = 1;
    s.group = 2;
    s.past_slots = 150;
    s.tokens = tokens;
    s.bits = tokens == 3 ? 4 : 8;
    s.softcap = 2.0f;
    check<float>(s);
    s.softcap = 0;
    for (const std::int64_t window : {0, 1, 17, 130, 1000}) {
      s.window = window;
      s.causal = window != 17;
      check<float>(s);
    }
    s.window = -1;
    s.causal = false;
    check<float>(s);
    s.masked = true;
    s.batch = 2;
    for (int which = 0; which < 4; ++which) {
      s.mask_by_head = which % 2 == 1;
      s.mask_by_query = which / 2 == 1;
      s.causal = which == 0;
      s.softcap = which == 3 ? 3.0f : 0.0f;
      check<float>(s);
    }
  }
}

// Lengths of rows that differ, in a buffer with room.
void check_lengths() {
  AttentionShape s;
  s.kv_heads = 1;
  s.batch = 3;
  s.tokens = 20;
  s.last_slots = {19, 3, 11};
  check<float>(s);
  s.past_slots = 600;
  s.tokens = 1;
  s.last_slots = {512, 3, 255};
  check<float>(s);
  s.total = 700;
  s.last_slots = {-1, 0, 699};
  check<float>(s);
  set_multiprocessors(1);  // no runs: every warp has several tiles
  s.past_slots = 1200;
  s.last_slots = {1199, 3, 830};
  for (const int bits : {4, 8}) {
    s.bits = bits;
    check<Half>(s);
  }
}

// The plan of a call follows from its capacity alone: the same launches serve every length.
void check_same_plan() {
  AttentionShape s;
  s.past_slots = 900;
  std::size_t bytes = 0;
  for (const std::int32_t last : {5, 300, 899}) {
    s.last_slots = {last};
    const AttentionCase<float> c(s);
    AttentionCall call = c.call;
    call.last_slots = nullptr;  // not looked at
    const std::size_t found = attention_cuda_scratch_bytes(s.form(), call);
    EXPECT(bytes == 0 || bytes == found, "%zu bytes of scratch, then %zu", bytes, found);
    bytes = found;
  }
}

// Lengths that do not fit are cut: nothing is read or written beside the cache.
void check_wrong_lengths() {
  for (const std::int32_t last : {-100, 40, 2147483647}) {
    AttentionShape s;
    s.past_slots = 40;
    AttentionCase<float> right(s), wrong(s);
    right.shape.last_slots = {last < 0 ? -1 : 39};
    right.refresh();
    right.call.slots = 40;
    right.present_key.resize(s.kv_heads * 40 * s.row());
    right.present_value.resize(right.present_key.size());
    wrong = right;
    wrong.refresh();
    wrong.call.slots = 40;
    run(right);
    wrong.shape.last_slots = {last};
    run(wrong);
    EXPECT(right.output == wrong.output && right.present_key == wrong.present_key, "a length of %d", last);
  }
}

// Against the CPU's path for every machine, where nothing is rotated: rows to the bit.
void check_as_cpu() {
  for (const int bits : {4, 8}) {
    for (const std::size_t tokens : {1, 18}) {
      AttentionShape s;
      s.bits = bits;
      s.tokens = tokens;
      s.kv_heads = 1;
      s.group = 4;
      s.head_size = 96;
      s.past_slots = 90;
      s.rotation_order = 0;
      AttentionCase<float> here(s), there(s);
      run(here);
      there.run(Isa::kScalar);
      EXPECT(here.present_key == there.present_key && here.present_value == there.present_value, "rows of %d bits",
             bits);
      float most = 0;
      for (std::size_t i = 0; i < here.output.size(); ++i) {
        most = std::fmax(most, std::fabs(here.output[i] - there.output[i]));
      }
      EXPECT(most < 1e-3f, "%d bits, %zu tokens: %g apart", bits, tokens, static_cast<double>(most));
    }
  }
}

// Chunks of a prompt give the same bits as all of it at once, where slots are not cut in runs; rows always.
void check_chunks() {
  set_multiprocessors(1);
  for (const int bits : {4, 8}) {
    AttentionShape s;
    s.kv_heads = 1;
    s.group = 1;
    s.tokens = 150;
    s.bits = bits;
    s.window = bits == 8 ? 40 : -1;
    AttentionCase<float> all(s);
    run(all);
    std::vector<float> output;
    std::vector<std::uint8_t> keys, values;
    const std::size_t step = 50;
    for (std::size_t at = 0; at < s.tokens; at += step) {
      AttentionShape part = s;
      part.tokens = step;
      part.past_slots = at;
      AttentionCase<float> c(part);
      const auto cut = [&](const std::vector<float>& from) {
        return std::vector<float>(from.begin() + static_cast<std::ptrdiff_t>(at * s.head_size),
                                  from.begin() + static_cast<std::ptrdiff_t>((at + step) * s.head_size));
      };
      c.query = cut(all.query);
      c.key = cut(all.key);
      c.value = cut(all.value);
      c.past_key = keys;
      c.past_value = values;
      c.refresh();
      run(c);
      keys = c.present_key;
      values = c.present_value;
      output.insert(output.end(), c.output.begin(), c.output.end());
    }
    EXPECT(keys == all.present_key && values == all.present_value, "%d bits: rows in chunks", bits);
    EXPECT(output == all.output, "%d bits: in chunks", bits);
  }
}

// Behind the slots in use, a buffer may hold anything; in place is as grown.
void check_in_place() {
  set_multiprocessors(8);
  for (const std::size_t tokens : {2, 40}) {
    AttentionShape s;
    s.kv_heads = 2;
    s.group = 2;
    s.tokens = tokens;
    s.past_slots = 61;
    s.bits = tokens == 2 ? 4 : 8;
    const std::size_t room = 61 + tokens + 13;
    s.total = room;  // the same plan
    s.last_slots = {static_cast<std::int32_t>(61 + tokens) - 1};
    AttentionCase<Half> grown(s), fixed(s);
    run(grown);
    fixed.shape.past_slots = room;
    fixed.present_key.assign(s.kv_heads * room * s.row(), 0xff);
    fixed.present_value = fixed.present_key;
    const auto row = static_cast<std::ptrdiff_t>(s.row()), all = static_cast<std::ptrdiff_t>(room);
    for (std::ptrdiff_t place = 0; place < 2; ++place) {
      std::copy_n(grown.past_key.begin() + place * 61 * row, 61 * row, fixed.present_key.begin() + place * all * row);
      std::copy_n(grown.past_value.begin() + place * 61 * row, 61 * row,
                  fixed.present_value.begin() + place * all * row);
    }
    fixed.in_place();
    run(fixed);
    EXPECT(std::memcmp(grown.output.data(), fixed.output.data(), grown.output.size() * sizeof(Half)) == 0,
           "%zu tokens: in place as grown", tokens);
    for (std::ptrdiff_t place = 0; place < 2; ++place) {
      const std::ptrdiff_t used = 61 + static_cast<std::ptrdiff_t>(tokens), at = place * all * row;
      const auto same = [&](const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b) {
        return std::equal(a.begin() + at, a.begin() + at + used * row, b.begin() + at);
      };
      EXPECT(same(grown.present_key, fixed.past_key) && same(grown.present_value, fixed.past_value), "rows of %td",
             place);
      EXPECT(fixed.past_key[static_cast<std::size_t>(at + used * row)] == 0xff, "rows behind are left alone");
    }
  }
}

void check_not_finite() {
  AttentionShape s;
  s.kv_heads = 2;
  s.group = 3;
  s.tokens = 8;
  s.past_slots = 12;
  s.rotation_order = 0;
  check_spoiled(kWho, s, [](auto& c) { run(c); }, [](const auto& c) { check_rows(c); });
  AttentionCase<float> c(s);
  c.query[(3 * s.heads() + 2) * s.head_size] = std::nanf("");
  run(c);
  for (std::size_t i = 0; i < c.output.size(); ++i) {
    EXPECT(std::isnan(c.output[i]) == (i / s.head_size == 3 * s.heads() + 2), "value %zu", i);
  }
  AttentionShape alone;  // nothing but NaN to see, then nothing at all
  alone.tokens = 1;
  AttentionCase<float> one(alone);
  one.key.assign(one.key.size(), std::nanf(""));
  run(one);
  for (const float value : one.output) EXPECT(std::isnan(value), "NaN alone");
  alone.masked = true;
  alone.past_slots = 40;
  AttentionCase<float> none(alone);
  for (float& each : none.mask) each = -2e30f;
  run(none);
  EXPECT(none.output == std::vector<float>(none.output.size(), 0.0f), "nothing to see gives zeros");
  AttentionCase<float> zero(s);  // a query without a direction sees all alike; rows without a step
  std::fill(zero.query.begin(), zero.query.end(), 0.0f);
  std::fill(zero.value.begin(), zero.value.end(), -3.25f);
  run(zero);
  check_rows(zero);
  check_values(kWho, zero, kRelative, kSpreads);
}

// Weights of very different size, and scores that are multiplied by a negative number.
void check_scores() {
  AttentionShape s;
  s.kv_heads = 1;
  s.group = 2;
  s.past_slots = 200;
  AttentionCase<float> c(s);
  for (float& each : c.query) each *= 30.0f;
  run(c);
  check_values(kWho, c, kRelative, kSpreads);
  AttentionForm form = s.form();
  form.score_scale = -form.score_scale;
  AttentionCase<float> turned = c;
  for (float& each : turned.query) each = -each;
  turned.refresh();
  const Rotation rotation(s);
  std::vector<std::uint8_t> scratch(attention_cuda_scratch_bytes(form, turned.call) + 256);
  std::size_t space = scratch.size();
  void* aligned = scratch.data();
  std::align(256, space - 256, aligned, space);
  attention_cuda(form, rotation.get(), Element::kFloat, turned.call, aligned, nullptr);
  EXPECT(turned.output == c.output, "minus by minus");
}

template <class Body>
void refuses(const char* text, const Body& body) {
  std::string words = "nothing";
  try {
    body();
  } catch (const std::invalid_argument& error) {
    words = error.what();
  }
  EXPECT(words.find(text) != std::string::npos, "refused in words: %s; found: %s", text, words.c_str());
}

void check_refusals() {
  const auto form = [](auto change) {
    AttentionForm f = AttentionShape().form();
    change(f);
    check_attention_cuda(f, 64);
  };
  refuses("no multiple of 'kv_num_heads' 2", [&] { form([](AttentionForm& f) { f.heads = 5; }); });
  refuses("no multiple of the transform's size 64", [&] { form([](AttentionForm& f) { f.format.head_size = 96; }); });
  refuses("on CUDA it must be a multiple of 16 from 16 to 256",
          [&] { form([](AttentionForm& f) { f.format.head_size = 320; }); });
  refuses("'head_size' is 72", [] {
    AttentionShape s;
    s.head_size = 72;
    check_attention_cuda(s.form(), 0);
  });
  refuses("too few for 4 new tokens", [] {
    AttentionShape s;
    s.tokens = 4;
    AttentionCase<float> c(s);
    c.call.slots = 3;
    attention_cuda_scratch_bytes(s.form(), c.call);
  });
  refuses("'key' must begin at a multiple of 16 bytes", [] {
    AttentionShape s;
    AttentionCase<float> c(s);
    c.call.key = static_cast<const float*>(c.call.key) + 1;
    attention_cuda(s.form(), nullptr, Element::kFloat, c.call, nullptr, nullptr);
  });
  refuses("too large for one call", [] {
    AttentionShape s;
    AttentionCase<float> c(s);
    c.call.slots = std::size_t{1} << 31;
    attention_cuda_scratch_bytes(s.form(), c.call);
  });
}

}  // namespace

int main() {
  check_sizes();
  check_small_device();
  check_edges();
  check_meanings();
  check_lengths();
  check_same_plan();
  check_wrong_lengths();
  check_as_cpu();
  check_chunks();
  check_in_place();
  check_not_finite();
  check_scores();
  check_refusals();
  return test::failures == 0 ? 0 : 1;
}
