// SPDX-License-Identifier: Apache-2.0
// Lists of spans, cut in tiles and spread over the threads. Results do not depend on the cut.
#ifndef SWAPIO_KERNELS_SPANS_H_
#define SWAPIO_KERNELS_SPANS_H_

#include <cstdint>
#include <vector>

#include "types.h"

namespace swapio {

// One contiguous run of elements of one parameter; the fields of SPAN_DTYPE. Addresses are 0 where
// the form has no such array; a `_to` address of 0 means in place.
struct Span {
  uint64_t param, grad, exp_avg, exp_avg_sq, low, out;
  uint64_t param_to, exp_avg_to, exp_avg_sq_to, low_to;
  int64_t numel;
  int64_t position;
  int32_t hyper;
  int32_t reserved;
};

// The fields of HYPER_DTYPE.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
  int32_t flags;
  int32_t reserved;
};

enum HyperFlag : int32_t { kDecoupled = 1, kBiasCorrection = 2, kMaximize = 4 };

struct AdamForm {
  Master master;
  Dtype state, grad;
  Out out;
  bool stochastic;
};

struct AdamCall {
  AdamForm form;
  AdamOp op;
  double scale = 1.0, new_scale = 1.0;
  uint64_t seed = 0;
  int max_threads = 0;
};

// Sorted positions; empty unless the master is split.
using TieList = std::vector<uint32_t>;

// Both throw std::invalid_argument; adam_spans checks everything before it changes an element.
AdamForm decode_form(int code, AdamOp op);
TieList adam_spans(const AdamCall& call, const Span* spans, int64_t num_spans, const Hyper* hypers,
                   int64_t num_hypers, const uint32_t* ties, int64_t num_ties);

struct Run {
  uint64_t from, to;
  int64_t numel;
};

// Sum of squares of each run, in float64.
std::vector<double> square_sums(const Run* runs, int64_t num_runs, Dtype dtype, int max_threads);
void convert_spans(const Run* runs, int64_t num_runs, Dtype from, Dtype to, int max_threads);
void copy_spans(const Run* runs, int64_t num_runs, int max_threads);  // numel in bytes
void fill_spans(const Run* runs, int64_t num_runs, int value, int max_threads);
// xxh3-64 of `numel` bytes at each `from`; false when the module was built without it.
bool hash_spans(const Run* runs, int64_t num_runs, uint64_t* hashes, int max_threads);

struct SplitRun {
  uint64_t master, high, low;
  int64_t numel;
  int64_t position;
};
TieList split_spans(const SplitRun* runs, int64_t num_runs, int max_threads);
void join_spans(const SplitRun* runs, int64_t num_runs, const uint32_t* ties, int64_t num_ties,
                int max_threads);

}  // namespace swapio

#endif  // SWAPIO_KERNELS_SPANS_H_
