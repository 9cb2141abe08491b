// SPDX-License-Identifier: Apache-2.0
// Square sums, conversions, and split/join of masters. Included once per ISA.

namespace swapio {
namespace SWAPIO_ISA {

// Element i is added to lane i mod kSumLanes in float64 (the square of an fp32 is exact there), and
// the lanes are added pairwise at the end: one order at every level. inf and nan survive into the
// sum, and finite fp32 values cannot overflow it, so the sum is finite exactly when all of them
// are.
template <class G>
static double square_sum(const void* data, int64_t numel) {
  const typename G::T* p = static_cast<const typename G::T*>(data);
  SquareSums sums;
  clear(sums);
  int64_t i = 0;
  for (; i + kWidth <= numel; i += kWidth) {
    prefetch_read(p + i + SWAPIO_PREFETCH_NUMEL);
    accumulate(sums, static_cast<int>(i % kSumLanes), G::load(p + i));
  }
  if (i < numel) {
    typename G::T rest[kWidth] = {};
    memcpy(rest, p + i, static_cast<size_t>(numel - i) * sizeof *rest);
    accumulate(sums, static_cast<int>(i % kSumLanes), G::load(rest));
  }
  double lane[kSumLanes];
  lanes(sums, lane);
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  }
  return lane[0];
}

template <class From, class To>
static void convert(const void* src, void* dst, int64_t numel) {
  const typename From::T* from = static_cast<const typename From::T*>(src);
  typename To::T* to = static_cast<typename To::T*>(dst);
  int64_t i = 0;
  for (; i + kWidth <= numel; i += kWidth) To::store(to + i, canonical(From::load(from + i)));
  if (i < numel) {
    const size_t rest = static_cast<size_t>(numel - i);
    typename From::T head[kWidth] = {};
    typename To::T tail[kWidth];
    memcpy(head, from + i, rest * sizeof *head);
    To::store(tail, canonical(From::load(head)));
    memcpy(to + i, tail, rest * sizeof *tail);
  }
}

static void split(const void* master, void* high, void* low, int64_t numel, uint64_t position,
                  Ties& ties) {
  const float* from = static_cast<const float*>(master);
  uint16_t* high_to = static_cast<uint16_t*>(high);
  uint16_t* low_to = static_cast<uint16_t*>(low);
  int64_t i = 0;
  for (; i + kWidth <= numel; i += kWidth) {
    split_master(canonical(load(from + i)), high_to + i, low_to + i,
                 position + static_cast<uint64_t>(i), ties);
  }
  if (i < numel) {
    const size_t rest = static_cast<size_t>(numel - i);
    float head[kWidth] = {};
    uint16_t high_tail[kWidth], low_tail[kWidth];
    memcpy(head, from + i, rest * sizeof *head);
    split_master(canonical(load(head)), high_tail, low_tail, position + static_cast<uint64_t>(i),
                 ties);
    memcpy(high_to + i, high_tail, rest * sizeof *high_tail);
    memcpy(low_to + i, low_tail, rest * sizeof *low_tail);
  }
}

static void join(const void* high, const void* low, void* master, int64_t numel, uint64_t position,
                 Ties& ties) {
  const uint16_t* high_from = static_cast<const uint16_t*>(high);
  const int16_t* low_from = static_cast<const int16_t*>(low);
  float* to = static_cast<float*>(master);
  int64_t i = 0;
  for (; i + kWidth <= numel; i += kWidth) {
    store(to + i, canonical(join_master(load_u16(high_from + i), load_i16(low_from + i),
                                        position + static_cast<uint64_t>(i), ties)));
  }
  if (i < numel) {
    const size_t rest = static_cast<size_t>(numel - i);
    uint16_t high_head[kWidth] = {};
    int16_t low_head[kWidth] = {};
    float tail[kWidth];
    memcpy(high_head, high_from + i, rest * sizeof *high_head);
    memcpy(low_head, low_from + i, rest * sizeof *low_head);
    store(tail, canonical(join_master(load_u16(high_head), load_i16(low_head),
                                      position + static_cast<uint64_t>(i), ties)));
    memcpy(to + i, tail, rest * sizeof *tail);
  }
}

static void fill_elementwise(KernelTable& table) {
  table.square_sum[kFp32] = square_sum<Fp32>;
  table.square_sum[kBf16] = square_sum<Bf16>;
  table.square_sum[kFp16] = square_sum<Fp16>;
  table.convert[kFp32][kBf16] = convert<Fp32, Bf16>;
  table.convert[kFp32][kFp16] = convert<Fp32, Fp16>;
  table.convert[kBf16][kFp32] = convert<Bf16, Fp32>;
  table.convert[kBf16][kFp16] = convert<Bf16, Fp16>;
  table.convert[kFp16][kFp32] = convert<Fp16, Fp32>;
  table.convert[kFp16][kBf16] = convert<Fp16, Bf16>;
  table.split = split;
  table.join = join;
}

}  // namespace SWAPIO_ISA
}  // namespace swapio
