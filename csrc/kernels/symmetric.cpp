// SPDX-License-Identifier: Apache-2.0
#include "symmetric.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu.h"
#include "dispatch.h"
#include "pool.h"

namespace swapio {

#if defined(SWAPIO_HAVE_X86)
namespace avx2 {
extern const SymmetricOps symmetric_ops;
}
namespace avx512 {
extern const SymmetricOps symmetric_ops;
}
#endif

namespace {

constexpr int64_t kPackedDepth = 512;   // terms of a group that one item packs
constexpr int64_t kTilesPerThread = 4;  // fewer leave threads idle at the end

const SymmetricOps* current_ops() {
#if defined(SWAPIO_HAVE_X86)
  static const bool has_fma = detect_x86().fma;
  const std::string level = current_level().name;
  if (has_fma && level == "avx512") return &avx512::symmetric_ops;
  if (has_fma && level == "avx2") return &avx2::symmetric_ops;
#endif
  return nullptr;
}

struct Tile {
  int64_t row, col;
};

struct Work {
  const SymmetricCall& call;
  const SymmetricOps& ops;
  int64_t num_groups = 0, num_depths = 0, edge = 0;  // edge: groups along a side of a tile
  std::vector<const SymmetricOperand*> unpacked{};
  std::vector<Tile> tiles{};
};

void run_pack(void* context, int64_t item, int) {
  const Work& work = *static_cast<const Work*>(context);
  const int64_t per_operand = work.num_groups * work.num_depths;
  const SymmetricOperand& operand = *work.unpacked[static_cast<size_t>(item / per_operand)];
  const int64_t at = item % per_operand;
  const int64_t first = at % work.num_depths * kPackedDepth;
  work.ops.pack(work.call, operand, at / work.num_depths, first,
                std::min(work.call.depth, first + kPackedDepth));
}

void run_tile(void* context, int64_t item, int) {
  const Work& work = *static_cast<const Work*>(context);
  const Tile& tile = work.tiles[static_cast<size_t>(item)];
  const auto last = [&work](int64_t first) { return std::min(work.num_groups, first + work.edge); };
  work.ops.tile(work.call, tile.row, last(tile.row), tile.col, last(tile.col));
}

}  // namespace

int64_t symmetric_group_rows() {
  const SymmetricOps* ops = current_ops();
  return ops == nullptr ? 0 : ops->group_rows;
}

void symmetric_product(const SymmetricCall& call, int max_threads) {
  const SymmetricOps* ops = current_ops();
  if (ops == nullptr) throw std::runtime_error("this SIMD level has no symmetric product");
  if (call.order <= 0) return;
  Work work{call, *ops};
  work.num_groups = (call.order + ops->group_rows - 1) / ops->group_rows;
  work.num_depths = (call.depth + kPackedDepth - 1) / kPackedDepth;
  // Fewer rows than a group are all in the tail.
  const bool is_one = call.left.packed == call.right.packed && call.left.tail == call.right.tail;
  if (!call.left.is_packed) work.unpacked.push_back(&call.left);
  if (!call.right.is_packed && !is_one) work.unpacked.push_back(&call.right);
  const int64_t num_operands = static_cast<int64_t>(work.unpacked.size());
  parallel_for(num_operands * work.num_groups * work.num_depths, max_threads, run_pack, &work);

  const int64_t threads = max_threads > 0 ? std::min(max_threads, num_threads()) : num_threads();
  work.edge = kTileEdge / ops->group_rows;
  const auto num_tiles = [&work] {
    const int64_t side = (work.num_groups + work.edge - 1) / work.edge;
    return side * (side + 1) / 2;
  };
  while (work.edge > 1 && num_tiles() < threads * kTilesPerThread) work.edge /= 2;
  work.tiles.reserve(static_cast<size_t>(num_tiles()));
  for (int64_t row = 0; row < work.num_groups; row += work.edge) {
    for (int64_t col = row; col < work.num_groups; col += work.edge) {
      work.tiles.push_back({row, col});
    }
  }
  parallel_for(num_tiles(), max_threads, run_tile, &work);
}

}  // namespace swapio
