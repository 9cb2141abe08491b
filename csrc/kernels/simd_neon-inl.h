// SPDX-License-Identifier: Apache-2.0
// 16 lanes in four NEON registers (AArch64, which has division and square root).
#include <arm_neon.h>
#include <string.h>

namespace swapio {
namespace SWAPIO_ISA {

constexpr int kWidth = 16;
constexpr int kParts = 4;
struct F {
  float32x4_t v[kParts];
};
struct I {
  int32x4_t v[kParts];
};
struct M {
  uint32x4_t v[kParts];
};

#define SWAPIO_FOR_PARTS(type, expression)              \
  type r;                                               \
  for (int i = 0; i < kParts; i++) r.v[i] = expression; \
  return r

SWAPIO_INLINE F load(const float* p) { SWAPIO_FOR_PARTS(F, vld1q_f32(p + 4 * i)); }
SWAPIO_INLINE void store(float* p, F x) {
  for (int i = 0; i < kParts; i++) vst1q_f32(p + 4 * i, x.v[i]);
}
SWAPIO_INLINE F set1(float x) { SWAPIO_FOR_PARTS(F, vdupq_n_f32(x)); }
SWAPIO_INLINE F add(F a, F b) { SWAPIO_FOR_PARTS(F, vaddq_f32(a.v[i], b.v[i])); }
SWAPIO_INLINE F sub(F a, F b) { SWAPIO_FOR_PARTS(F, vsubq_f32(a.v[i], b.v[i])); }
SWAPIO_INLINE F mul(F a, F b) { SWAPIO_FOR_PARTS(F, vmulq_f32(a.v[i], b.v[i])); }
SWAPIO_INLINE F div(F a, F b) { SWAPIO_FOR_PARTS(F, vdivq_f32(a.v[i], b.v[i])); }
SWAPIO_INLINE F sqrt(F a) { SWAPIO_FOR_PARTS(F, vsqrtq_f32(a.v[i])); }
SWAPIO_INLINE F abs(F a) { SWAPIO_FOR_PARTS(F, vabsq_f32(a.v[i])); }
SWAPIO_INLINE M lt(F a, F b) { SWAPIO_FOR_PARTS(M, vcltq_f32(a.v[i], b.v[i])); }
SWAPIO_INLINE M not_lt(F a, F b) { SWAPIO_FOR_PARTS(M, vmvnq_u32(vcltq_f32(a.v[i], b.v[i]))); }
SWAPIO_INLINE M eq(F a, F b) { SWAPIO_FOR_PARTS(M, vceqq_f32(a.v[i], b.v[i])); }
SWAPIO_INLINE M is_nan(F a) { SWAPIO_FOR_PARTS(M, vmvnq_u32(vceqq_f32(a.v[i], a.v[i]))); }
SWAPIO_INLINE M both(M a, M b) { SWAPIO_FOR_PARTS(M, vandq_u32(a.v[i], b.v[i])); }
SWAPIO_INLINE M either(M a, M b) { SWAPIO_FOR_PARTS(M, vorrq_u32(a.v[i], b.v[i])); }
SWAPIO_INLINE F select(M m, F yes, F no) {
  SWAPIO_FOR_PARTS(F, vbslq_f32(m.v[i], yes.v[i], no.v[i]));
}
SWAPIO_INLINE bool any(M m) {
  const uint32x4_t all = vorrq_u32(vorrq_u32(m.v[0], m.v[1]), vorrq_u32(m.v[2], m.v[3]));
  return vmaxvq_u32(all) != 0;
}
SWAPIO_INLINE uint32_t mask_bits(M m) {
  uint32_t lanes[kWidth], bits = 0;
  for (int i = 0; i < kParts; i++) vst1q_u32(lanes + 4 * i, m.v[i]);
  for (int i = 0; i < kWidth; i++) bits |= (lanes[i] & 1u) << i;
  return bits;
}

SWAPIO_INLINE I bits(F x) { SWAPIO_FOR_PARTS(I, vreinterpretq_s32_f32(x.v[i])); }
SWAPIO_INLINE F from_bits(I x) { SWAPIO_FOR_PARTS(F, vreinterpretq_f32_s32(x.v[i])); }
SWAPIO_INLINE I iset1(int32_t x) { SWAPIO_FOR_PARTS(I, vdupq_n_s32(x)); }
SWAPIO_INLINE I iload(const int32_t* p) { SWAPIO_FOR_PARTS(I, vld1q_s32(p + 4 * i)); }
SWAPIO_INLINE I iadd(I a, I b) { SWAPIO_FOR_PARTS(I, vaddq_s32(a.v[i], b.v[i])); }
SWAPIO_INLINE I isub(I a, I b) { SWAPIO_FOR_PARTS(I, vsubq_s32(a.v[i], b.v[i])); }
SWAPIO_INLINE I imul(I a, I b) { SWAPIO_FOR_PARTS(I, vmulq_s32(a.v[i], b.v[i])); }
SWAPIO_INLINE I iand(I a, I b) { SWAPIO_FOR_PARTS(I, vandq_s32(a.v[i], b.v[i])); }
SWAPIO_INLINE I ixor(I a, I b) { SWAPIO_FOR_PARTS(I, veorq_s32(a.v[i], b.v[i])); }
template <int N>
SWAPIO_INLINE I ishr(I a) {
  SWAPIO_FOR_PARTS(I, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), N)));
}
template <int N>
SWAPIO_INLINE I ishl(I a) {
  SWAPIO_FOR_PARTS(I, vshlq_n_s32(a.v[i], N));
}
SWAPIO_INLINE M ieq(I a, I b) { SWAPIO_FOR_PARTS(M, vceqq_s32(a.v[i], b.v[i])); }
SWAPIO_INLINE I iota() {
  static const int32_t lanes[kWidth] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return iload(lanes);
}

SWAPIO_INLINE I load_u16(const uint16_t* p) {
  SWAPIO_FOR_PARTS(I, vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p + 4 * i))));
}
SWAPIO_INLINE I load_i16(const int16_t* p) { SWAPIO_FOR_PARTS(I, vmovl_s16(vld1_s16(p + 4 * i))); }
SWAPIO_INLINE void store_u16(uint16_t* p, I x) {
  for (int i = 0; i < kParts; i++) vst1_u16(p + 4 * i, vmovn_u32(vreinterpretq_u32_s32(x.v[i])));
}
SWAPIO_INLINE F load_f16(const uint16_t* p) {
  SWAPIO_FOR_PARTS(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
SWAPIO_INLINE void store_f16(uint16_t* p, F x) {
  for (int i = 0; i < kParts; i++) {
    vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
  }
}

SWAPIO_INLINE void stream_u16(uint16_t* p, I x) { store_u16(p, x); }
SWAPIO_INLINE void stream_f16(uint16_t* p, F x) { store_f16(p, x); }
SWAPIO_INLINE void stream_f32(float* p, F x) { store(p, x); }
SWAPIO_INLINE void end_streams() {}

SWAPIO_INLINE void prefetch_read(const void* p) { __builtin_prefetch(p, 0, 3); }
SWAPIO_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1, 3); }

struct SquareSums {
  float64x2_t sum[2 * kParts];
};
SWAPIO_INLINE void clear(SquareSums& sums) {
  for (int i = 0; i < 2 * kParts; i++) sums.sum[i] = vdupq_n_f64(0.0);
}
SWAPIO_INLINE void accumulate(SquareSums& sums, int, F x) {
  for (int i = 0; i < kParts; i++) {
    const float64x2_t low = vcvt_f64_f32(vget_low_f32(x.v[i]));
    const float64x2_t high = vcvt_high_f64_f32(x.v[i]);
    sums.sum[2 * i] = vaddq_f64(sums.sum[2 * i], vmulq_f64(low, low));
    sums.sum[2 * i + 1] = vaddq_f64(sums.sum[2 * i + 1], vmulq_f64(high, high));
  }
}
SWAPIO_INLINE void lanes(const SquareSums& sums, double* out) {
  for (int i = 0; i < 2 * kParts; i++) vst1q_f64(out + 2 * i, sums.sum[i]);
}

#undef SWAPIO_FOR_PARTS

}  // namespace SWAPIO_ISA
}  // namespace swapio
