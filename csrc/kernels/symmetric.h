// SPDX-License-Identifier: Apache-2.0
// Matrix products of which it is known that the result is symmetric: half the work, and the other
// half of the matrix is written from the same registers.
//
//     out = alpha left right^T + beta add        left, right: order x depth, add and out symmetric
//
// Invariants: an element is a sum over blocks of kDepthBlock, each summed in order with fused
// multiply-adds, so its bits depend neither on the number of threads nor on the vector width; out
// is symmetric to the bit. All memory but a tile per thread comes from the caller.
//
// Compiled with wide instruction sets too: no inline functions, see types.h.
#ifndef SWAPIO_KERNELS_SYMMETRIC_H_
#define SWAPIO_KERNELS_SYMMETRIC_H_

#include <cstdint>

namespace swapio {

constexpr int64_t kDepthBlock = 128;  // terms that are summed in registers
constexpr int64_t kTileEdge = 192;    // rows and columns of the largest tile of a thread
constexpr int64_t kPackedGroup = 48;  // rows that packed memory is rounded to, for every width

// One operand: element (row, k) is data[row * row_stride + k * depth_stride]. It is copied to
// `packed` (whole groups of rows, order * depth elements) and `tail` (kPackedGroup * depth), unless
// it is there already.
struct SymmetricOperand {
  const float* data;
  int64_t row_stride;
  int64_t depth_stride;
  float* packed;
  float* tail;
  bool is_packed;
};

struct SymmetricCall {
  SymmetricOperand left;
  SymmetricOperand right;  // with the left one's memory: the same matrix, packed once
  float* out;
  int64_t out_stride;  // elements from row to row
  const float* add;    // nullptr: nothing is added
  int64_t add_stride;
  float alpha;
  float beta;
  int64_t order;
  int64_t depth;
};

// Groups of rows are the unit of packing and of tiles.
struct SymmetricOps {
  int64_t group_rows;
  void (*pack)(const SymmetricCall& call, const SymmetricOperand& operand, int64_t group,
               int64_t first, int64_t last);
  void (*tile)(const SymmetricCall& call, int64_t row_first, int64_t row_last, int64_t col_first,
               int64_t col_last);
};

// Rows that the kernel of the SIMD level in use packs together; 0 where there is none. An operand
// takes whole groups of rows in `packed`, and the rest in `tail`.
int64_t symmetric_group_rows();
// Throws std::runtime_error where there is none.
void symmetric_product(const SymmetricCall& call, int max_threads);

}  // namespace swapio

#endif  // SWAPIO_KERNELS_SYMMETRIC_H_
