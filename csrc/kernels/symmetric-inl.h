// SPDX-License-Identifier: Apache-2.0
// The symmetric product for one vector width. The including file defines SWAPIO_ISA and, in that
// namespace, Vector, kLanes, kBlockRows and the operations load, store, zero, fill, add, mul, fma.
//
//     packed      [group][k][kGroup]: rows of an operand side by side, so both the broadcasts of
//                 the left one and the vectors of the right one are read in order
//     block       kBlockRows x kGroup sums in registers, over kDepthBlock terms
//     tile        some groups by some groups: sums stay in the second-level cache over all depth
//
// Facts -> consequences:
// - a tile's packed rows come from memory or from another core's cache, and the strided reads of
//   the left operand defeat the hardware's prefetchers -> each block fetches a share of what the
//   next depth block will read (worth 20 % at 1024 x 1024);
// - the result is written once, to rows that lie a page apart -> lines are fetched one group ahead.
#include <immintrin.h>

#include <cstdint>

#include "symmetric.h"

namespace swapio {
namespace SWAPIO_ISA {
namespace {

constexpr int kVectors = 3;
constexpr int64_t kGroup = kVectors * kLanes;
constexpr int64_t kTileGroups = kTileEdge / kGroup;
constexpr int64_t kFloatsPerLine = 16;
constexpr int64_t kPrefetchEvery = 4;  // terms of a block between prefetches
static_assert(kGroup % kBlockRows == 0 && kPackedGroup % kGroup == 0 && kTileEdge % kGroup == 0);

// Not the standard library's: see types.h.
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline const float* packed_at(const SymmetricCall& call, const SymmetricOperand& operand,
                              int64_t group, int64_t k) {
  const int64_t whole = call.order / kGroup;
  const float* rows = group < whole ? operand.packed + group * call.depth * kGroup : operand.tail;
  return rows + k * kGroup;
}

inline int64_t rows_of(const SymmetricCall& call, int64_t group) {
  return smaller(kGroup, call.order - group * kGroup);
}

// target[j][i] = source[i][j] for 8 x 8.
inline void transpose8(const float* source, int64_t source_stride, float* target,
                       int64_t target_stride) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(source + i * source_stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(target + i * target_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(target + (i + 4) * target_stride,
                     _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

// Copies terms [first, last) of a group's rows; the rows beyond the last one are zero.
void pack(const SymmetricCall& call, const SymmetricOperand& operand, int64_t group, int64_t first,
          int64_t last) {
  const int64_t rows = rows_of(call, group);
  const float* source =
      operand.data + group * kGroup * operand.row_stride + first * operand.depth_stride;
  float* target = const_cast<float*>(packed_at(call, operand, group, first));
  int64_t k = first;
  if (operand.row_stride == 1 && rows == kGroup) {
    for (; k < last; k++, source += operand.depth_stride, target += kGroup) {
      for (int v = 0; v < kVectors; v++) store(target + v * kLanes, load(source + v * kLanes));
    }
  } else if (operand.depth_stride == 1 && rows % 8 == 0) {
    for (; k + 8 <= last; k += 8, source += 8, target += 8 * kGroup) {
      for (int64_t i = 0; i < rows; i += 8) {
        transpose8(source + i * operand.row_stride, operand.row_stride, target + i, kGroup);
      }
      for (int64_t j = 0; j < 8; j++) {
        for (int64_t i = rows; i < kGroup; i++) target[j * kGroup + i] = 0.0f;
      }
    }
  }
  for (; k < last; k++, source += operand.depth_stride, target += kGroup) {
    for (int64_t i = 0; i < kGroup; i++) target[i] = i < rows ? source[i * operand.row_stride] : 0;
  }
}

// Where a block's prefetches begin, and how many lines it fetches at a time.
struct Prefetch {
  const float* from;
  int lines;
};

// sums (+)= left right^T over `depth` terms, for kBlockRows rows and `Columns` vectors of columns.
template <int Columns>
void block(const float* left, const float* right, int64_t depth, float* sums, bool is_first,
           Prefetch next) {
  Vector sum[kBlockRows][Columns];
  for (int r = 0; r < kBlockRows; r++) {
    for (int v = 0; v < Columns; v++) sum[r][v] = zero();
  }
  for (int64_t k = 0; k < depth; k++, left += kGroup, right += kGroup) {
    if (k % kPrefetchEvery == 0) {
      for (int i = 0; i < next.lines; i++, next.from += kFloatsPerLine) {
        __builtin_prefetch(next.from, 0, 2);
      }
    }
    Vector columns[Columns];
#pragma GCC unroll 3
    for (int v = 0; v < Columns; v++) columns[v] = load(right + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; r++) {
      const Vector row = fill(left[r]);
#pragma GCC unroll 3
      for (int v = 0; v < Columns; v++) sum[r][v] = fma(row, columns[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; r++) {
#pragma GCC unroll 3
    for (int v = 0; v < Columns; v++) {
      float* at = sums + r * kTileEdge + v * kLanes;
      store(at, is_first ? sum[r][v] : add(load(at), sum[r][v]));
    }
  }
}

// The groups of rows and of columns that a tile covers: [row_first, row_last) etc.
struct Tile {
  int64_t row_first, row_last, col_first, col_last;
  bool is_diagonal() const { return row_first == col_first; }
  int64_t num_rows() const { return row_last - row_first; }
  int64_t num_cols() const { return col_last - col_first; }
  int64_t num_pairs() const {
    return is_diagonal() ? num_rows() * (num_rows() + 1) / 2 : num_rows() * num_cols();
  }
};

// Deals the packed rows of the next depth block out to the blocks of this one.
class Ahead {
 public:
  Ahead(const SymmetricCall& call, const Tile& tile, int64_t k, int64_t depth)
      : call_(call), tile_(tile), k_(k), depth_(depth) {
    if (depth <= 0) return;  // nothing follows
    const bool packed_once = tile.is_diagonal() && call.left.packed == call.right.packed;
    num_groups_ = tile.num_rows() + (packed_once ? 0 : tile.num_cols());
    const int64_t chances = tile.num_pairs() * (kGroup / kBlockRows) * (depth / kPrefetchEvery);
    const int64_t lines = num_groups_ * depth * kGroup / kFloatsPerLine;
    lines_ = static_cast<int>((lines + chances - 1) / larger(chances, 1));
    share_ = depth / kPrefetchEvery * lines_ * kFloatsPerLine;
  }

  Prefetch next() {
    if (group_ == num_groups_) return {nullptr, 0};
    const bool is_left = group_ < tile_.num_rows();
    const float* rows = packed_at(
        call_, is_left ? call_.left : call_.right,
        is_left ? tile_.row_first + group_ : tile_.col_first + group_ - tile_.num_rows(), k_);
    const Prefetch share{rows + at_, lines_};
    at_ += share_;
    if (at_ >= depth_ * kGroup) {
      at_ = 0;
      group_++;
    }
    return share;
  }

 private:
  const SymmetricCall& call_;
  const Tile& tile_;
  const int64_t k_, depth_;
  int64_t num_groups_ = 0, group_ = 0;
  int64_t share_ = 0, at_ = 0;  // elements of a group
  int lines_ = 0;
};

// All sums of a tile over one depth block; of a tile on the diagonal, those on or above it.
void sum_tile(const SymmetricCall& call, const Tile& tile, int64_t k, float* sums) {
  const int64_t depth = smaller(kDepthBlock, call.depth - k);
  Ahead ahead(call, tile, k + depth, smaller(kDepthBlock, call.depth - k - depth));
  for (int64_t col = tile.col_first; col < tile.col_last; col++) {
    const float* right = packed_at(call, call.right, col, k);
    const int64_t columns = rows_of(call, col);
    const int64_t row_last = smaller(tile.row_last, col + 1);
    for (int64_t row = tile.row_first; row < row_last; row++) {
      const float* left = packed_at(call, call.left, row, k);
      const int64_t rows = rows_of(call, row);
      for (int64_t r = 0; r < rows; r += kBlockRows) {
        const int64_t below = row == col ? r / kLanes * kLanes : 0;  // the diagonal: not wanted
        const float* from = right + below;
        float* at = sums + ((row - tile.row_first) * kGroup + r) * kTileEdge +
                    (col - tile.col_first) * kGroup + below;
        const Prefetch next = ahead.next();
        if (columns - below > 2 * kLanes) {
          block<3>(left + r, from, depth, at, k == 0, next);
        } else if (columns - below > kLanes) {
          block<2>(left + r, from, depth, at, k == 0, next);
        } else {
          block<1>(left + r, from, depth, at, k == 0, next);
        }
      }
    }
  }
}

// A group of rows and one of columns: kGroup x kGroup elements, or fewer at the end.
struct Pair {
  int64_t row, col;
};

// Fetches row `r` of a pair, and of its mirror image, for writing.
inline void fetch_row(const SymmetricCall& call, const Pair& pair, int64_t r) {
  const int64_t row = pair.row, col = pair.col;
  if (r < rows_of(call, row)) {
    const float* out = call.out + (row * kGroup + r) * call.out_stride + col * kGroup;
    for (int64_t i = 0; i < kGroup; i += kFloatsPerLine) __builtin_prefetch(out + i, 1, 2);
    if (call.add != nullptr) {
      const float* add = call.add + (row * kGroup + r) * call.add_stride + col * kGroup;
      for (int64_t i = 0; i < kGroup; i += kFloatsPerLine) __builtin_prefetch(add + i, 0, 2);
    }
  }
  if (r < rows_of(call, col)) {
    const float* mirror = call.out + (col * kGroup + r) * call.out_stride + row * kGroup;
    for (int64_t i = 0; i < kGroup; i += kFloatsPerLine) __builtin_prefetch(mirror + i, 1, 2);
  }
}

// out and its mirror image for one pair, from its sums; fetches for `next`, unless that is null.
void write_pair(const SymmetricCall& call, const Pair& pair, float* sums, const Pair* next) {
  const int64_t row = pair.row, col = pair.col;
  const int64_t rows = rows_of(call, row), cols = rows_of(call, col);
  const bool is_diagonal = row == col;
  for (int64_t r = 0; r < rows; r++) {
    if (next != nullptr) fetch_row(call, *next, r);
    float* sum = sums + r * kTileEdge;
    float* out = call.out + (row * kGroup + r) * call.out_stride + col * kGroup;
    const float* addend =
        call.add ? call.add + (row * kGroup + r) * call.add_stride + col * kGroup : nullptr;
    int64_t c = is_diagonal ? r : 0;
    for (; !is_diagonal && c + kLanes <= cols; c += kLanes) {
      Vector value = mul(fill(call.alpha), load(sum + c));
      if (addend) value = fma(fill(call.beta), load(addend + c), value);
      store(sum + c, value);
      store(out + c, value);
    }
    for (; c < cols; c++) {
      float value = call.alpha * sum[c];
      if (addend) value = __builtin_fmaf(call.beta, addend[c], value);
      sum[c] = out[c] = value;
    }
  }
  float* mirror = call.out + col * kGroup * call.out_stride + row * kGroup;
  if (!is_diagonal && rows % 8 == 0 && cols % 8 == 0) {
    for (int64_t c = 0; c < cols; c += 8) {
      for (int64_t r = 0; r < rows; r += 8) {
        transpose8(sums + r * kTileEdge + c, kTileEdge, mirror + c * call.out_stride + r,
                   call.out_stride);
      }
    }
    return;
  }
  for (int64_t c = 0; c < cols; c++) {
    const int64_t last = is_diagonal ? c : rows;
    for (int64_t r = 0; r < last; r++) mirror[c * call.out_stride + r] = sums[r * kTileEdge + c];
  }
}

void tile(const SymmetricCall& call, int64_t row_first, int64_t row_last, int64_t col_first,
          int64_t col_last) {
  alignas(64) static thread_local float sums[kTileEdge * kTileEdge];
  const Tile tile{row_first, row_last, col_first, col_last};
  for (int64_t k = 0; k < call.depth; k += kDepthBlock) sum_tile(call, tile, k, sums);
  for (int64_t row = row_first; row < row_last; row++) {
    for (int64_t col = larger(row, col_first); col < col_last; col++) {
      const bool ends_row = col + 1 == col_last;
      const Pair next = ends_row ? Pair{row + 1, larger(row + 1, col_first)} : Pair{row, col + 1};
      write_pair(call, {row, col},
                 sums + (row - row_first) * kGroup * kTileEdge + (col - col_first) * kGroup,
                 next.row < row_last ? &next : nullptr);
    }
  }
}

}  // namespace

extern const SymmetricOps symmetric_ops;
const SymmetricOps symmetric_ops{kGroup, pack, tile};

}  // namespace SWAPIO_ISA
}  // namespace swapio
