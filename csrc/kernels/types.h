// SPDX-License-Identifier: Apache-2.0
// Plain types shared by the generic objects and the per-ISA objects.
//
// This header is compiled with wide instruction sets too, so it must stay free of the STL and of
// inline functions: the linker keeps one copy of an inline function for the whole module, and it
// may keep the one that was compiled for AVX-512.
#ifndef SWAPIO_KERNELS_TYPES_H_
#define SWAPIO_KERNELS_TYPES_H_

#include <stddef.h>
#include <stdint.h>

// Vectors of two registers travel through memory unless everything is inlined.
#define SWAPIO_INLINE static inline __attribute__((always_inline))

namespace swapio {

enum Dtype : int { kFp32 = 0, kBf16 = 1, kFp16 = 2, kNumDtypes = 3 };

// Where the fp32 value that the step updates lives: an fp32 array (a parameter that is its own
// master, or a separate master), bf16 upper half + int16 lower half, or nowhere (the low-precision
// parameter itself is widened, stepped and rounded again).
enum Master : int {
  kMasterFp32 = 0,
  kMasterSplit = 1,
  kMasterBf16 = 2,
  kMasterFp16 = 3,
  kNumMasters = 4
};

enum AdamOp : int { kStep = 0, kRescale = 1, kRollback = 2, kNumAdamOps = 3 };

enum Out : int { kOutNone = 0, kOutBf16 = 1, kOutFp16 = 2 };

// Hyperparameters of one step, rounded once from double to float. The names are those of the
// formula in adam-inl.h.
struct AdamConstants {
  float scale;      // of the gradient (negative with maximize)
  float new_scale;  // rescale only
  float b1, c1;     // beta1, 1 - beta1
  float b2, c2;     // beta2, 1 - beta2
  float decay;      // 1 - lr * weight_decay with decoupled decay, else 1
  float l2;         // weight_decay with L2 decay
  float step_size;  // lr / (1 - beta1^t)
  float r2;         // 1 / sqrt(1 - beta2^t)
  float eps;
  float inv_b1, inv_b2, inv_decay;  // rollback only
  int use_l2;
  int out;         // Out
  int stochastic;  // masterless bf16 only
  int streams;     // write `out` past the caches where its alignment allows
};

// A contiguous run of elements. The `_to` pointers equal their sources when the step is in place.
struct AdamPiece {
  const void* param;
  const void* grad;
  const void* exp_avg;
  const void* exp_avg_sq;
  const void* low;
  void* param_to;
  void* exp_avg_to;
  void* exp_avg_sq_to;
  void* low_to;
  void* out;
  int64_t numel;
  uint64_t position;   // of the first element in its sub-group
  uint64_t noise_key;  // of the stochastic rounding; constant within 2^32 positions
};

// Positions whose lower half is +32768 (see adam-inl.h). `in` is sorted; `out` has room for one
// entry per element of the piece.
struct Ties {
  const uint32_t* in;
  int64_t num_in;
  uint32_t* out;
  int64_t num_out;
};

using AdamFn = void (*)(const AdamPiece&, const AdamConstants&, Ties&);
// Sum of squares of one tile.
using SquareSumFn = double (*)(const void* data, int64_t numel);
using ConvertFn = void (*)(const void* src, void* dst, int64_t numel);
using SplitFn = void (*)(const void* master, void* high, void* low, int64_t numel,
                         uint64_t position, Ties& ties);
using JoinFn = void (*)(const void* high, const void* low, void* master, int64_t numel,
                        uint64_t position, Ties& ties);

// The kernels of one instruction set; null where a combination does not exist.
struct KernelTable {
  AdamFn adam[kNumAdamOps][kNumMasters][kNumDtypes /* state */][kNumDtypes /* grad */];
  SquareSumFn square_sum[kNumDtypes];
  ConvertFn convert[kNumDtypes /* from */][kNumDtypes /* to */];
  SplitFn split;
  JoinFn join;
};

// Accumulation lanes of a square sum: part of the result's definition, at every level.
constexpr int kSumLanes = 16;

}  // namespace swapio

#endif  // SWAPIO_KERNELS_TYPES_H_
