#include "matmul/product_cuda.h"

#include <stdexcept>
#include <string>

#include "common/cuda/launch.h"
#include "matmul/gemv_cuda.h"
#include "matmul/product_tile.cuh"
#include "matmul/weights.h"

namespace graphrot {
namespace {

using cuda::ProductArguments;
using cuda::Tile;

constexpr std::size_t kMostChannels = std::size_t{1} << 20;  // offsets within 256 rows or columns fit into 32 bits
constexpr std::size_t kMostRows = std::size_t{1} << 30;

constexpr std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }

// Stages are as many as fit with those of 4 bits: 98304 bytes for the large tile, so that the smallest devices (sm_86)
// have a block of it, and 48 KiB for the middle one. The small one is for few rows, where it must be far ahead of the
// weights it waits for.
template <int Bits, bool Grouped>
using Small = Tile<Bits, Grouped, 32, 32, 16, 16, 12, 1>;
template <int Bits, bool Grouped>
using Middle = Tile<Bits, Grouped, 64, 128, 32, 64, Bits == 4 ? 3 : 4, Grouped ? 2 : 3>;
template <int Bits, bool Grouped>
struct LargeTile {
  using Type = Tile<Bits, false, 128, 256, 64, 64, Bits == 4 ? 3 : 4, 1>;
};
template <int Bits>
struct LargeTile<Bits, true> {
  using Type = Tile<Bits, true, 128, 128, 32, 64, Bits == 4 ? 3 : 4, 1>;
};
template <int Bits, bool Grouped>
using Large = typename LargeTile<Bits, Grouped>::Type;

ProductArguments arguments_of(const CudaProduct& product, const CudaRows& codes, Element element, std::size_t rows,
                              void* out) {
  const std::size_t bits = static_cast<std::size_t>(product.bits), blocks = divide_up(product.channels, product.block);
  const auto address = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); };
  ProductArguments p{};
  p.weights = product.codes;
  p.scales = product.scales;
  p.zeros = product.zeros;
  p.bias = product.bias;
  p.codes = codes.codes;
  p.row_scales = codes.scales;
  p.row_sums = codes.sums;
  p.out = out;
  p.stride = codes.stride;
  p.rows = static_cast<unsigned>(rows);
  p.columns = static_cast<unsigned>(product.columns);
  p.groups = static_cast<unsigned>(product.groups);
  p.code_bytes = static_cast<unsigned>(divide_up(product.channels, 64) * 64);
  p.column_bytes = static_cast<unsigned>(blocks * product.block * bits / 8);
  p.zero_bytes = static_cast<unsigned>(divide_up(blocks * bits, 8));
  p.group_shift = product.group == 128 ? 2 : product.group == 64 ? 1 : 0;
  p.zero = product.zero;
  p.element = element;
  p.half_scales = product.half_scales;
  p.aligned = p.column_bytes % 16 == 0;
  p.wide = (product.columns * (element == Element::kFloat ? 4 : 2)) % 16 == 0 && address(out) % 16 == 0;
  return p;
}

template <class C>
void run_tile(const ProductArguments& p, CudaStream stream) {
  const std::size_t tiles = divide_up(p.rows, C::kRows) * divide_up(p.columns, C::kColumns);
  launch(&cuda::product_tile<C>, dim3(static_cast<unsigned>(tiles)), dim3(C::kThreads), C::kSharedBytes, stream, p);
}

template <int Bits, bool Grouped>
void run_by(CudaProductKernel kernel, const ProductArguments& p, CudaStream stream) {
  if (kernel == CudaProductKernel::kSmall) return run_tile<Small<Bits, Grouped>>(p, stream);
  if (kernel == CudaProductKernel::kMiddle) return run_tile<Middle<Bits, Grouped>>(p, stream);
  run_tile<Large<Bits, Grouped>>(p, stream);
}

// Cycles that a multiprocessor is about busy with 32 channels, if every one takes the same number of tiles: mmas at
// 640 products a cycle in each of four parts, or shared memory, and what stages cost beside.
template <class C>
std::size_t cycles(const CudaProduct& product, std::size_t rows, const CudaDevice& device, std::size_t cycles_of_tile) {
  const std::size_t tiles = divide_up(rows, C::kRows) * divide_up(product.columns, C::kColumns);
  return divide_up(tiles, static_cast<std::size_t>(device.multiprocessors)) * cycles_of_tile;
}

void refuse(const std::string& words) { throw std::invalid_argument(words); }

}  // namespace

void check_cuda_product(const CudaProduct& product, const CudaDevice& device) {
  if (device.major < 8) {
    refuse("the CUDA kernels need compute capability 8.0 (Ampere) or later, and this device has " +
           std::to_string(device.major) + "." + std::to_string(device.minor));
  }
  check_weights(product.channels, product.columns, product.group, product.block, product.bits);
  if (divide_up(product.channels, product.block) * product.block > kMostChannels) {
    refuse("attribute 'K' is " + std::to_string(product.channels) + " in blocks of " + std::to_string(product.block) +
           "; the CUDA kernel takes " + std::to_string(kMostChannels) + " channels at most");
  }
}

CudaProductKernel choose_cuda_product(const CudaProduct& product, std::size_t rows, const CudaDevice& device) {
  if (rows <= kCudaGemvRows) return CudaProductKernel::kGemv;
  const bool grouped = product.group < product.channels;
  const std::size_t large = grouped ? cycles<Large<4, true>>(product, rows, device, 210)
                                    : cycles<Large<4, false>>(product, rows, device, 410);
  const std::size_t middle = cycles<Middle<4, false>>(product, rows, device, 115);
  const std::size_t small = cycles<Small<4, false>>(product, rows, device, 28);
  if (large <= middle && large <= small) return CudaProductKernel::kLarge;
  return middle <= small ? CudaProductKernel::kMiddle : CudaProductKernel::kSmall;
}

void product_cuda(const CudaProduct& product, const CudaRows& codes, Element element, std::size_t rows, void* out,
                  void*, CudaStream stream) {
  product_cuda_by(choose_cuda_product(product, rows, current_device()), product, codes, element, rows, out, stream);
}

void product_cuda_by(CudaProductKernel kernel, const CudaProduct& product, const CudaRows& codes, Element element,
                     std::size_t rows, void* out, CudaStream stream) {
  if (rows == 0) return;
  if (rows > kMostRows) refuse("a product of " + std::to_string(rows) + " rows is more than the CUDA kernel takes");
  const ProductArguments p = arguments_of(product, codes, element, rows, out);
  const bool grouped = product.group < product.channels;
  if (kernel == CudaProductKernel::kGemv) return gemv_cuda(product.bits, grouped, p, current_device(), stream);
  if (product.bits == 4) return grouped ? run_by<4, true>(kernel, p, stream) : run_by<4, false>(kernel, p, stream);
  return grouped ? run_by<8, true>(kernel, p, stream) : run_by<8, false>(kernel, p, stream);
}

}  // namespace graphrot
