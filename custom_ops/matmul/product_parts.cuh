// What the kernels of the product have in common: arguments, shared memory without conflicts, codes to fragments,
// scales, outputs.
//
// One mma.sync m16n8k32 multiplies 32 channels of 16 rows (signed) and 8 columns (unsigned). In which order it takes
// the 32 is free, if both sides agree. With 4 bits a lane's fragment is made of one word of weights, of channels
// 8 * (l % 4) and following: w & 0x0f0f0f0f are the even ones, (w >> 4) & 0x0f0f0f0f the odd ones. Rows of codes come
// in that order (CudaRowsProblem: of 32 the even ones first), so that ldmatrix brings their fragments as registers of
// the mma want them, and nothing is moved.
#pragma once

#include "common/cuda/device.cuh"
#include "common/cuda/element.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/shared.cuh"

namespace graphrot::cuda {

struct ProductArguments {
  const std::uint8_t* weights;
  const void* scales;
  const std::uint8_t* zeros;
  const float* bias;
  const std::int8_t* codes;
  const float* row_scales;
  const std::int32_t* row_sums;
  void* out;
  std::size_t stride;     // of codes of a row
  unsigned rows, columns, groups;
  unsigned code_bytes;    // of a row that hold codes or the zeros after them: a multiple of 64
  unsigned column_bytes;  // of codes of a column
  unsigned zero_bytes;    // of zero points of a column
  unsigned group_shift;   // a group is 32 << group_shift channels, where there are several
  int zero;
  Element element;
  bool half_scales;
  bool aligned;           // columns of codes start at multiples of 16 bytes; else of 8
  bool wide;              // rows of outputs do
};

// Sums of groups of 32 to 128 channels are below 2^22 (128 * 127 * 255), so that they can be made in the fraction of
// this float: integers to floats for one subtraction, where a conversion would take four times as long.
inline constexpr int kWhole = 0x4b400000;  // 1.5 * 2^23

GRAPHROT_DEVICE float whole_to_float(int sum) { return __int_as_float(sum) - 12582912.0f; }

// Where byte `byte` of row `row` lies in shared memory, in rows of 64 or 128 bytes whose pieces of 16 bytes change
// places from row to row: a warp that reads one piece in each of 8 rows meets every bank once, and so does one that
// writes 128 bytes of neighbouring rows. Rows that are 8 apart have the same order, and pieces of neighbouring steps
// differ in the same bits as without it.
template <unsigned RowBytes>
GRAPHROT_DEVICE unsigned place(unsigned row, unsigned byte) {
  static_assert(RowBytes == 64 || RowBytes == 128, "half of the banks or all of them");
  return row * RowBytes + (byte ^ (row / (128 / RowBytes) % (RowBytes / 16) * 16));
}

// 16 bytes of a column that is aligned to 8, some of them behind its end: where columns are not aligned to 16 they go
// through registers, and are seen, like those of cp.async, after the next barrier.
GRAPHROT_DEVICE void copy_eights(Shared<std::uint8_t> memory, unsigned at, const std::uint8_t* from, bool first,
                                 bool second) {
  const uint2 low = first ? load8(from) : make_uint2(0, 0), high = second ? load8(from + 8) : make_uint2(0, 0);
  memory.vector<uint4>(at) = make_uint4(low.x, low.y, high.x, high.y);
}

// A lane's weights of 32 channels by 8 columns, as they lie in shared memory: one piece with 4 bits, two with 8.
template <int Bits>
struct Packed;

template <int Bits>
inline constexpr unsigned kStepBytes = 4 * Bits;  // of a column

template <>
struct Packed<4> {
  unsigned word;
  GRAPHROT_DEVICE void load(Shared<std::uint8_t> memory, unsigned at) { word = memory.vector<unsigned>(at); }
  GRAPHROT_DEVICE void unpack(unsigned (&b)[2]) const {
    b[0] = word & 0x0f0f0f0fu;
    b[1] = (word >> 4) & 0x0f0f0f0fu;
  }
};

template <>
struct Packed<8> {
  unsigned words[2];
  GRAPHROT_DEVICE void load(Shared<std::uint8_t> memory, unsigned at) {
    words[0] = memory.vector<unsigned>(at);
    words[1] = memory.vector<unsigned>(at ^ 16);
  }
  GRAPHROT_DEVICE void unpack(unsigned (&b)[2]) const {
    b[0] = words[0];
    b[1] = words[1];
  }
};

GRAPHROT_DEVICE float load_scale(const ProductArguments& p, unsigned column, unsigned group) {
  const std::size_t at = static_cast<std::size_t>(column) * p.groups + group;
  return p.half_scales ? widen(static_cast<const Half*>(p.scales)[at]) : static_cast<const float*>(p.scales)[at];
}

template <int Bits>
GRAPHROT_DEVICE int load_zero(const ProductArguments& p, unsigned column, unsigned group) {
  if (p.zeros == nullptr) return p.zero;
  const std::uint8_t* zeros = p.zeros + static_cast<std::size_t>(column) * p.zero_bytes;
  return Bits == 8 ? zeros[group] : (zeros[group / 2] >> (4 * (group % 2))) & 15;
}

GRAPHROT_DEVICE float load_bias(const ProductArguments& p, unsigned column) {
  return p.bias != nullptr ? p.bias[column] : 0.0f;
}

template <class T>
GRAPHROT_DEVICE void store(const ProductArguments& p, unsigned row, unsigned column, float value) {
  static_cast<T*>(p.out)[static_cast<std::size_t>(row) * p.columns + column] = narrow<T>(value);
}

GRAPHROT_DEVICE void store(const ProductArguments& p, unsigned row, unsigned column, float value) {
  if (p.element == Element::kHalf) {
    store<Half>(p, row, column, value);
  } else if (p.element == Element::kBFloat16) {
    store<BFloat16>(p, row, column, value);
  } else {
    store<float>(p, row, column, value);
  }
}

}  // namespace graphrot::cuda
