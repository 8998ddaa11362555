// What a whole warp does together, and the instructions of one thread.
#include <cstring>

#include "common/element.h"
#include "cuda_on_cpu/shared_memory.h"
#include "cuda_on_cpu/shim.h"

namespace graphrot {
namespace {

CudaDevice device_now{9, 0, 2, 227 * 1024};

}  // namespace

CudaDevice current_device() { return device_now; }

void copy_to_device(void* device, const void* host, std::size_t bytes) { std::memcpy(device, host, bytes); }
void copy_to_host(void* host, const void* device, std::size_t bytes) { std::memcpy(host, device, bytes); }

}  // namespace graphrot

namespace graphrot::shim {
namespace {

constexpr unsigned kLanes = 32, kAllLanes = 0xffffffffu;

struct Product {
  void* d;
  const unsigned *a, *b;
};

struct Matrices {
  unsigned* words;
  std::size_t row;  // byte of shared memory
};

unsigned byte_of(unsigned word, unsigned i) { return word >> 8 * i & 0xffu; }
int signed_byte(unsigned byte) { return static_cast<int>(byte) - (byte > 127 ? 256 : 0); }

// A [16, 32] and B [32, 8] of bytes, laid out as common/cuda/ptx.cuh says.
template <bool kSignedB>
void resolve_bytes(void* const (&brought)[kLanes], unsigned) {
  int a[16][32], b[32][8];
  for (unsigned l = 0; l < kLanes; ++l) {
    const auto& own = *static_cast<const Product*>(brought[l]);
    for (unsigned i = 0; i < 4; ++i) {
      for (unsigned j = 0; j < 4; ++j) {
        a[l / 4 + 8 * (i % 2)][4 * (l % 4) + 16 * (i / 2) + j] = signed_byte(byte_of(own.a[i], j));
        if (i >= 2) continue;
        const unsigned byte = byte_of(own.b[i], j);
        b[4 * (l % 4) + 16 * i + j][l / 4] = kSignedB ? signed_byte(byte) : static_cast<int>(byte);
      }
    }
  }
  for (unsigned l = 0; l < kLanes; ++l) {
    auto* const d = static_cast<int*>(static_cast<const Product*>(brought[l])->d);
    for (unsigned i = 0; i < 4; ++i) {
      auto sum = static_cast<unsigned>(d[i]);  // wraps, as the instruction does
      for (unsigned k = 0; k < 32; ++k) {
        sum += static_cast<unsigned>(a[l / 4 + 8 * (i / 2)][k] * b[k][2 * (l % 4) + i % 2]);
      }
      d[i] = static_cast<int>(sum);
    }
  }
}

template <class T>
void resolve_halves(void* const (&brought)[kLanes], unsigned) {
  double a[16][16], b[16][8];
  const auto half = [](unsigned word, unsigned i) {
    return static_cast<double>(to_float(T{static_cast<std::uint16_t>(word >> 16 * i)}));
  };
  for (unsigned l = 0; l < kLanes; ++l) {
    const auto& own = *static_cast<const Product*>(brought[l]);
    for (unsigned i = 0; i < 4; ++i) {
      for (unsigned j = 0; j < 2; ++j) {
        a[l / 4 + 8 * (i % 2)][2 * (l % 4) + 8 * (i / 2) + j] = half(own.a[i], j);
        if (i < 2) b[2 * (l % 4) + 8 * i + j][l / 4] = half(own.b[i], j);
      }
    }
  }
  for (unsigned l = 0; l < kLanes; ++l) {
    auto* const d = static_cast<float*>(static_cast<const Product*>(brought[l])->d);
    for (unsigned i = 0; i < 4; ++i) {
      double sum = static_cast<double>(d[i]);
      for (unsigned k = 0; k < 16; ++k) sum += a[l / 4 + 8 * (i / 2)][k] * b[k][2 * (l % 4) + i % 2];
      d[i] = static_cast<float>(sum);
    }
  }
}

template <bool kTransposed>
void resolve_matrices(void* const (&brought)[kLanes], unsigned) {
  std::uint16_t numbers[4][8][8];
  for (unsigned l = 0; l < kLanes; ++l) {
    const auto& own = *static_cast<const Matrices*>(brought[l]);
    shared_memory().read(own.row, sizeof numbers[0][0], numbers[l / 8][l % 8]);
  }
  for (unsigned l = 0; l < kLanes; ++l) {
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = l / 4, column = 2 * (l % 4);
      const unsigned low = kTransposed ? numbers[i][column][row] : numbers[i][row][column];
      const unsigned high = kTransposed ? numbers[i][column + 1][row] : numbers[i][row][column + 1];
      static_cast<const Matrices*>(brought[l])->words[i] = low | high << 16;
    }
  }
}

void resolve_shuffle(void* const (&brought)[kLanes], unsigned mask) {
  std::uint32_t values[kLanes] = {};
  for (unsigned l = 0; l < kLanes; ++l) {
    if ((mask >> l & 1u) != 0) values[l] = static_cast<const Shuffled*>(brought[l])->value;
  }
  for (unsigned l = 0; l < kLanes; ++l) {
    if ((mask >> l & 1u) == 0) continue;
    auto& own = *static_cast<Shuffled*>(brought[l]);
    if (own.source >= kLanes || (mask >> own.source & 1u) == 0) {
      throw Violation("lane " + std::to_string(l) + " of a shuffle asks for the value of lane " +
                      std::to_string(own.source) + ", which takes no part");
    }
    own.value = values[own.source];
  }
}

struct Vote {
  bool yes;
  unsigned said;
};

void resolve_vote(void* const (&brought)[kLanes], unsigned mask) {
  unsigned said = 0;
  for (unsigned l = 0; l < kLanes; ++l) {
    if ((mask >> l & 1u) != 0 && static_cast<const Vote*>(brought[l])->yes) said |= 1u << l;
  }
  for (unsigned l = 0; l < kLanes; ++l) {
    if ((mask >> l & 1u) != 0) static_cast<Vote*>(brought[l])->said = said;
  }
}

}  // namespace

void set_device(const CudaDevice& device) { device_now = device; }

void shuffle(const char* what, unsigned mask, Shuffled& own) { meet(what, mask, &own, &resolve_shuffle); }

unsigned vote(const char* what, unsigned mask, bool yes) {
  Vote own{yes, 0};
  meet(what, mask, &own, &resolve_vote);
  return own.said;
}

int dot4(unsigned u, int s, int acc) {
  auto sum = static_cast<unsigned>(acc);
  for (unsigned i = 0; i < 4; ++i) {
    sum += static_cast<unsigned>(static_cast<int>(byte_of(u, i)) * signed_byte(byte_of(static_cast<unsigned>(s), i)));
  }
  return static_cast<int>(sum);
}

uint4 load16(const void* from) {
  check_global(from, sizeof(uint4), sizeof(uint4), "loads");
  uint4 v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

void store16(void* to, uint4 v) {
  check_global(to, sizeof(uint4), sizeof(uint4), "stores");
  std::memcpy(to, &v, sizeof v);
}

void copy_async(std::size_t shared_byte, const void* from, bool valid) {
  shared_memory().copy(shared_byte, from, valid);
}
void commit_copies() { shared_memory().commit(); }
void wait_copies(std::size_t but) { shared_memory().wait(but); }

void multiply_bytes(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool b_signed) {
  Product own{d, a, b};
  if (b_signed) return meet("mma m16n8k32 s8.s8", kAllLanes, &own, &resolve_bytes<true>);
  meet("mma m16n8k32 s8.u8", kAllLanes, &own, &resolve_bytes<false>);
}

void multiply_halves(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool bfloat) {
  Product own{d, a, b};
  if (bfloat) return meet("mma m16n8k16 bf16", kAllLanes, &own, &resolve_halves<BFloat16>);
  meet("mma m16n8k16 f16", kAllLanes, &own, &resolve_halves<Half>);
}

void load_matrices(unsigned (&words)[4], std::size_t shared_byte, bool transposed) {
  Matrices own{words, shared_byte};
  if (transposed) return meet("ldmatrix.trans", kAllLanes, &own, &resolve_matrices<true>);
  meet("ldmatrix", kAllLanes, &own, &resolve_matrices<false>);
}

}  // namespace graphrot::shim
