// Product of quantized rows with packed weights:
//   y[m, n] = rows.scales[m] * sum over g of scales[n, g] * sum over k in g of codes[m, k] * (weight[n, k] - zero[n, g])
// plus bias[n]. Inner sums are exact, in 32-bit integers; outer ones are taken in float, group after group.
#pragma once

#include <cstddef>

#include "common/element.h"
#include "common/isa.h"
#include "matmul/rows.h"
#include "matmul/weights.h"

namespace graphrot {

// Columns of the tiles first_tile to last_tile (exclusive) for `count` >= 1 rows. `out` is the whole output, row 0 and
// column 0, with rows `out_stride` elements apart; only these tiles' columns below N are written, so that threads may
// take disjoint tiles. `scratch` holds product_scratch_bytes() bytes, aligned to 64, for each call of its own.
using ProductRun = void (*)(const ProductProblem& problem, const QuantizedRows& rows, std::size_t count,
                            std::size_t first_tile, std::size_t last_tile, void* out, std::size_t out_stride,
                            void* scratch);

struct ProductKernels {
  ProductRun run[kElementCount];  // indexed by Element
};

const ProductKernels& product_scalar();
#if GRAPHROT_X86
const ProductKernels& product_avx2();
const ProductKernels& product_vnni();
const ProductKernels& product_amx();
#endif
const ProductKernels& product_kernels(Isa isa);

// Enough for every path; does not grow with `count` beyond a block of rows.
std::size_t product_scratch_bytes(const ProductProblem& problem, std::size_t count);

}  // namespace graphrot
