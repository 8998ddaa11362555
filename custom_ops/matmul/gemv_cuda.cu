// Few rows: a block makes 16 columns (8 with 8 bits) of all rows, and its warps share the channels: unit u of 128
// channels is that of warp u % warps, so that a block reads its columns front to back. Each warp has a ring of its own
// in shared memory, filled by cp.async some units ahead, and meets no other warp while it multiplies.
//
// Reading weights at 4.8 TB/s (H200) gives a multiprocessor 20 bytes a cycle, or 1 KiB in 50 cycles, in which it issues
// 200 instructions; a unit takes about 125 of them, and 36 cycles of shared memory, for any number of rows up to 8:
// one mma does what takes eight dp4a for four rows. 4.8 TB/s take about 30 KiB on their way to each multiprocessor: a
// warp has 3 KiB of weights on the way, a block of 8 warps 24, and two to four blocks are there at once.
//
// Integers of one scale per column are summed in any order. Groups must be added in order in float: warps leave the
// sums of groups in shared memory, and after each round of units one thread for each output adds them up.
#include "matmul/gemv_cuda.h"

#include <cstddef>

#include "matmul/product_cuda.h"

namespace graphrot {
namespace cuda {
namespace {

constexpr unsigned kUnit = 128;        // channels
constexpr unsigned kUnitSteps = kUnit / 32;
constexpr unsigned kDepth = 4;         // units of a ring, one of which is read
constexpr unsigned kWeightBytes = 1024;  // of a unit: 16 columns of 4 bits, 8 of 8 bits
constexpr unsigned kCopiedRows = 4;    // codes of four rows are one copy by every lane
constexpr unsigned kMostThreads = 512;

template <int Bits>
constexpr unsigned kGemvColumns = Bits == 4 ? 16 : 8;

// How shared memory is shared out: rings, then what is exchanged.
struct GemvShape {
  unsigned passes;       // copies of four rows
  unsigned round_units;  // units between two exchanges; a multiple of the warps
  unsigned pitch;        // floats or integers of the groups of a round, and four more, which spreads them over banks

  GRAPHROT_DEVICE unsigned stage_bytes() const { return kWeightBytes + passes * kCopiedRows * kUnit; }
};

// What a warp copies and where it finds it. Its units are `warps` apart.
template <int Bits>
class GemvRing {
 public:
  static constexpr unsigned kColumns = kGemvColumns<Bits>, kAcross = kColumns / 8;
  static constexpr unsigned kColumnBytes = kUnit * Bits / 8;

  GRAPHROT_DEVICE GemvRing(const ProductArguments& p, const GemvShape& shape, unsigned first_column)
      : stage_bytes_(shape.stage_bytes()), passes_(shape.passes) {
    const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    memory_ = shared_array<std::uint8_t>(0, blockDim.x / kWarp * kDepth * stage_bytes_);
    first_stage_ = warp * kDepth * stage_bytes_;
    constexpr unsigned kPieces = kColumnBytes / 16, kApart = kWarp / kPieces;
    column_byte_ = warp * kColumnBytes + lane % kPieces * 16;
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned column = first_column + lane / kPieces + i * kApart, last = p.columns - 1;
      valid_columns_[i] = column <= last;
      const std::size_t from = column <= last ? column : last;
      columns_[i] = p.weights + from * p.column_bytes + column_byte_;
      columns_to_[i] = place<kColumnBytes>(lane / kPieces + i * kApart, lane % kPieces * 16);
    }
    code_byte_ = warp * kUnit + lane % 8 * 16;
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned row = lane / 8 + i * kCopiedRows;
      valid_rows_[i] = row < p.rows;
      rows_[i] = p.codes + (row < p.rows ? row : 0) * p.stride + code_byte_;
      rows_to_[i] = kWeightBytes + place<kUnit>(row, lane % 8 * 16);
    }
    columns_at_ = place<kColumnBytes>(lane / 4, lane % 4 * 4);
    rows_at_ = kWeightBytes + place<kUnit>(lane % (passes_ * kCopiedRows), lane / 16 * 16);
  }

  GRAPHROT_DEVICE unsigned first_stage() const { return first_stage_; }

  // Begins to copy the next unit to the stage at byte `to`.
  GRAPHROT_DEVICE void next(const ProductArguments& p, unsigned to) {
    const unsigned warps = blockDim.x / kWarp;
    const bool first = column_byte_ < p.column_bytes, second = column_byte_ + 8 < p.column_bytes;
    if (p.aligned) {
      GRAPHROT_UNROLL
      for (unsigned i = 0; i < 2; ++i) {
        cp_async16(memory_.at(to + columns_to_[i]), columns_[i], first && valid_columns_[i]);
      }
    } else {
      GRAPHROT_UNROLL
      for (unsigned i = 0; i < 2; ++i) {
        copy_eights(memory_, to + columns_to_[i], columns_[i], first && valid_columns_[i], second && valid_columns_[i]);
      }
    }
    const bool inside = code_byte_ < p.code_bytes;
    cp_async16(memory_.at(to + rows_to_[0]), rows_[0], inside && valid_rows_[0]);
    if (passes_ > 1) cp_async16(memory_.at(to + rows_to_[1]), rows_[1], inside && valid_rows_[1]);
    GRAPHROT_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
      columns_[i] += warps * kColumnBytes;
      rows_[i] += warps * kUnit;
    }
    column_byte_ += warps * kColumnBytes;
    code_byte_ += warps * kUnit;
  }

  GRAPHROT_DEVICE void after(unsigned* stage) const {
    *stage += stage_bytes_;
    if (*stage == first_stage_ + kDepth * stage_bytes_) *stage = first_stage_;
  }

  // Sums of rows 0 to 7 (numbers 0 and 1) with 32 channels of each column. The mma's other rows, and those that there
  // are not, are copies whose sums nobody reads: that costs nothing, and zeros would be moves.
  GRAPHROT_DEVICE void multiply(unsigned stage, unsigned step, int (&sums)[kAcross][4]) const {
    unsigned rows[4];
    load_matrices(rows, memory_.at(stage + (rows_at_ ^ (step * 32))));
    GRAPHROT_UNROLL
    for (unsigned a = 0; a < kAcross; ++a) {
      Packed<Bits> packed;
      packed.load(memory_, stage + (columns_at_ ^ (step * kStepBytes<Bits>)) + 8 * a * kColumnBytes);
      unsigned b[2];
      packed.unpack(b);
      mma_m16n8k32(sums[a], rows, b);
    }
  }

 private:
  Shared<std::uint8_t> memory_;
  unsigned stage_bytes_, first_stage_, passes_;
  const std::uint8_t* columns_[2];
  const std::int8_t* rows_[2];
  unsigned column_byte_, code_byte_;  // of the next unit
  unsigned columns_to_[2], rows_to_[2], columns_at_, rows_at_;
  bool valid_columns_[2], valid_rows_[2];
};

// Groups of one round: sums [rows][columns][pitch], scales and zero points [columns][pitch], sums of codes
// [rows][pitch].
struct GemvExchange {
  Shared<int> sums;
  Shared<float> scales;
  Shared<int> zeros, row_sums;

  GRAPHROT_DEVICE GemvExchange(unsigned at, unsigned rows, unsigned columns, unsigned pitch)
      : sums(shared_array<int>(at, rows * columns * pitch)),
        scales(shared_array<float>(at + 4 * rows * columns * pitch, columns * pitch)),
        zeros(shared_array<int>(at + 4 * (rows + 1) * columns * pitch, columns * pitch)),
        row_sums(shared_array<int>(at + 4 * (rows + 2) * columns * pitch, rows * pitch)) {}

  template <int Bits>
  GRAPHROT_DEVICE void load(const ProductArguments& p, unsigned first_column, unsigned pitch, unsigned first_group,
                            unsigned count) const {
    for (unsigned i = threadIdx.x; i < kGemvColumns<Bits> * count; i += blockDim.x) {
      const unsigned c = i / count, g = i % count, column = first_column + c;
      if (column >= p.columns) break;
      scales[c * pitch + g] = load_scale(p, column, first_group + g);
      if (p.zeros != nullptr) zeros[c * pitch + g] = load_zero<Bits>(p, column, first_group + g);
    }
    for (unsigned i = threadIdx.x; i < p.rows * count; i += blockDim.x) {
      row_sums[i / count * pitch + i % count] = p.row_sums[i / count * p.groups + first_group + i % count];
    }
  }

  // fma(sum, scale, total), group after group. Four are read at once, since what takes time is how long each takes to
  // follow the one before.
  GRAPHROT_DEVICE float add(const ProductArguments& p, unsigned row, unsigned column, unsigned columns, unsigned pitch,
                            unsigned count, float total) const {
    const unsigned at = (row * columns + column) * pitch, scale_at = column * pitch, row_at = row * pitch;
    unsigned g = 0;
    for (; g + 4 <= count; g += 4) {
      const int4 sum = sums.vector<int4>(at + g), codes = row_sums.vector<int4>(row_at + g);
      const float4 scale = scales.vector<float4>(scale_at + g);
      int4 zero = make_int4(p.zero, p.zero, p.zero, p.zero);
      if (p.zeros != nullptr) zero = zeros.vector<int4>(scale_at + g);
      total = fmaf(whole_to_float(sum.x - zero.x * codes.x), scale.x, total);
      total = fmaf(whole_to_float(sum.y - zero.y * codes.y), scale.y, total);
      total = fmaf(whole_to_float(sum.z - zero.z * codes.z), scale.z, total);
      total = fmaf(whole_to_float(sum.w - zero.w * codes.w), scale.w, total);
    }
    for (; g < count; ++g) {
      const int zero = p.zeros != nullptr ? zeros[scale_at + g] : p.zero;
      total = fmaf(whole_to_float(sums[at + g] - zero * row_sums[row_at + g]), scales[scale_at + g], total);
    }
    return total;
  }
};

template <int Bits, bool Grouped>
GRAPHROT_KERNEL(kMostThreads, Grouped ? 1 : 2) gemv(const ProductArguments p, const GemvShape shape) {
  using Ring = GemvRing<Bits>;
  constexpr unsigned kColumns = Ring::kColumns, kAcross = Ring::kAcross;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const unsigned first_column = blockIdx.x * kColumns, units = (p.code_bytes + kUnit - 1) / kUnit;
  Ring ring(p, shape, first_column);
  const unsigned exchange_at = warps * kDepth * shape.stage_bytes();

  unsigned ahead = warp, free_stage = ring.first_stage();  // what is copied next, and to where
  const auto copy_next = [&] {
    if (ahead < units) ring.next(p, free_stage);
    cp_async_commit();
    ahead += warps;
    ring.after(&free_stage);
  };
  GRAPHROT_UNROLL
  for (unsigned i = 0; i + 1 < kDepth; ++i) copy_next();

  const unsigned row = threadIdx.x / kColumns, column = threadIdx.x % kColumns;  // of this thread's output
  const bool has_output = row < p.rows && first_column + column < p.columns;
  int sums[kAcross][4] = {};
  float total = 0.0f;
  unsigned unit = warp, stage = ring.first_stage();
  const auto take_next = [&] {  // lanes read what others copied, and what they have read is copied over
    cp_async_wait<static_cast<int>(kDepth) - 2>();
    __syncwarp();
    copy_next();
  };

  if constexpr (Grouped) {
    const GemvExchange exchange(exchange_at, p.rows, kColumns, shape.pitch);
    const unsigned unit_groups = kUnitSteps >> p.group_shift;
    for (unsigned first_unit = 0; first_unit < units; first_unit += shape.round_units) {
      const unsigned end = units - first_unit < shape.round_units ? units : first_unit + shape.round_units;
      const unsigned first_group = first_unit * unit_groups, left = p.groups - first_group;
      const unsigned count = left < shape.round_units * unit_groups ? left : shape.round_units * unit_groups;
      exchange.template load<Bits>(p, first_column, shape.pitch, first_group, count);
      for (; unit < end; unit += warps) {
        take_next();
        GRAPHROT_UNROLL
        for (unsigned step = 0; step < kUnitSteps; ++step) {
          const unsigned in_group = step & ((1u << p.group_shift) - 1);
          if (in_group == 0) {
            GRAPHROT_UNROLL
            for (unsigned a = 0; a < kAcross; ++a) sums[a][0] = sums[a][1] = kWhole;
          }
          ring.multiply(stage, step, sums);
          const unsigned group = unit * unit_groups + (step >> p.group_shift) - first_group;
          if (in_group + 1 != 1u << p.group_shift || group >= count || lane / 4 >= p.rows) continue;
          GRAPHROT_UNROLL
          for (unsigned a = 0; a < kAcross; ++a) {
            const unsigned at = (lane / 4 * kColumns + 8 * a + lane % 4 * 2) * shape.pitch + group;
            exchange.sums[at] = sums[a][0];
            exchange.sums[at + shape.pitch] = sums[a][1];
          }
        }
        ring.after(&stage);
      }
      __syncthreads();
      if (has_output) total = exchange.add(p, row, column, kColumns, shape.pitch, count, total);
      if (end < units) __syncthreads();
    }
  } else {
    const auto parts = shared_array<int>(exchange_at, warps * p.rows * kColumns);
    for (; unit < units; unit += warps) {
      take_next();
      GRAPHROT_UNROLL
      for (unsigned step = 0; step < kUnitSteps; ++step) ring.multiply(stage, step, sums);
      ring.after(&stage);
    }
    GRAPHROT_UNROLL
    for (unsigned a = 0; a < kAcross; ++a) {
      if (lane / 4 >= p.rows) continue;
      const unsigned at = (warp * p.rows + lane / 4) * kColumns + 8 * a + lane % 4 * 2;
      parts.template vector<int2>(at) = make_int2(sums[a][0], sums[a][1]);
    }
    __syncthreads();
    if (has_output) {
      int sum = -load_zero<Bits>(p, first_column + column, 0) * p.row_sums[row];
      for (unsigned w = 0; w < warps; ++w) sum += parts[(w * p.rows + row) * kColumns + column];
      total = fmaf(static_cast<float>(sum), load_scale(p, first_column + column, 0), 0.0f);
    }
  }
  if (has_output) {
    store(p, row, first_column + column,
          fmaf(total, p.row_scales[row], load_bias(p, first_column + column)));
  }
}

struct Launch {
  unsigned warps;
  GemvShape shape;
  std::size_t shared_bytes;
};

Launch share_out(const ProductArguments& p, int bits, bool grouped, unsigned warps) {
  constexpr unsigned kExchangeBytes = 16384;  // about; more would leave room for fewer blocks
  const unsigned columns = bits == 4 ? kGemvColumns<4> : kGemvColumns<8>;
  const unsigned units = (p.code_bytes + kUnit - 1) / kUnit;
  Launch launch{warps, {(p.rows + kCopiedRows - 1) / kCopiedRows, 0, 0}, 0};
  const std::size_t stage = kWeightBytes + launch.shape.passes * kCopiedRows * kUnit;
  launch.shared_bytes = warps * kDepth * stage;
  if (!grouped) {
    launch.shared_bytes += sizeof(int) * warps * p.rows * columns;
    return launch;
  }
  const unsigned entries = p.rows * columns + 2 * columns + p.rows, unit_groups = kUnitSteps >> p.group_shift;
  const unsigned fit = kExchangeBytes / (4 * entries * unit_groups) / warps, needed = (units + warps - 1) / warps;
  const unsigned turns = fit < 1 ? 1 : fit < needed ? fit : needed;
  launch.shape.round_units = turns * warps;
  launch.shape.pitch = launch.shape.round_units * unit_groups + 4;
  launch.shared_bytes += sizeof(int) * entries * launch.shape.pitch;
  return launch;
}

template <int Bits>
void run(const ProductArguments& p, bool grouped, const Launch& how, CudaStream stream) {
  const unsigned blocks = (p.columns + kGemvColumns<Bits> - 1) / kGemvColumns<Bits>;
  const dim3 grid(blocks), block(how.warps * kWarp);
  if (grouped) {
    launch(&gemv<Bits, true>, grid, block, how.shared_bytes, stream, p, how.shape);
  } else {
    launch(&gemv<Bits, false>, grid, block, how.shared_bytes, stream, p, how.shape);
  }
}

}  // namespace
}  // namespace cuda

void gemv_cuda(int bits, bool grouped, const cuda::ProductArguments& p, const CudaDevice& device, CudaStream stream) {
  // Where there are fewer blocks than multiprocessors, sixteen warps keep each busy; else blocks of eight are enough.
  const unsigned columns = bits == 4 ? cuda::kGemvColumns<4> : cuda::kGemvColumns<8>;
  const bool alone = p.columns <= static_cast<std::size_t>(device.multiprocessors) * columns;
  cuda::Launch how = cuda::share_out(p, bits, grouped, alone ? cuda::kMostThreads / cuda::kWarp : 8);
  if (how.shared_bytes > device.shared_bytes) how = cuda::share_out(p, bits, grouped, 8);
  if (bits == 4) {
    cuda::run<4>(p, grouped, how, stream);
  } else {
    cuda::run<8>(p, grouped, how, stream);
  }
}

}  // namespace graphrot
