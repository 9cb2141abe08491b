// SPDX-License-Identifier: Apache-2.0
// 16 lanes in one AVX-512 register (F, BW, DQ, VL). AVX512_BF16 conversions are not used: they
// flush subnormals.
#include <immintrin.h>
#include <string.h>

namespace swapio {
namespace SWAPIO_ISA {

constexpr int kWidth = 16;
using F = __m512;
using I = __m512i;
using M = __mmask16;

static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
static inline F set1(float x) { return _mm512_set1_ps(x); }
static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F sqrt(F a) { return _mm512_sqrt_ps(a); }
static inline M lt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline M eq(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
static inline M both(M a, M b) { return static_cast<M>(a & b); }
static inline M either(M a, M b) { return static_cast<M>(a | b); }
static inline F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline bool any(M m) { return m != 0; }
static inline uint32_t mask_bits(M m) { return m; }

static inline I bits(F x) { return _mm512_castps_si512(x); }
static inline F from_bits(I b) { return _mm512_castsi512_ps(b); }
static inline F abs(F x) {
  return from_bits(_mm512_and_si512(bits(x), _mm512_set1_epi32(0x7fffffff)));
}
static inline I iset1(int32_t x) { return _mm512_set1_epi32(x); }
static inline I iload(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
static inline I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
static inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
static inline I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
template <int N>
static inline I ishr(I a) {
  return _mm512_srli_epi32(a, N);
}
template <int N>
static inline I ishl(I a) {
  return _mm512_slli_epi32(a, N);
}
static inline M ieq(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
static inline I iota() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

static inline __m256i load_16x16(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
static inline I load_u16(const uint16_t* p) { return _mm512_cvtepu16_epi32(load_16x16(p)); }
static inline I load_i16(const int16_t* p) { return _mm512_cvtepi16_epi32(load_16x16(p)); }
static inline void store_u16(uint16_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
static inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_16x16(p)); }
static inline void store_f16(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline void prefetch_read(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
static inline void prefetch_write(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

struct SquareSums {
  __m512d low, high;
};
static inline void clear(SquareSums& sums) { sums.low = sums.high = _mm512_setzero_pd(); }
static inline void accumulate(SquareSums& sums, int, F x) {
  const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  const __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  sums.low = _mm512_add_pd(sums.low, _mm512_mul_pd(a, a));
  sums.high = _mm512_add_pd(sums.high, _mm512_mul_pd(b, b));
}
static inline void lanes(const SquareSums& sums, double* out) {
  _mm512_storeu_pd(out, sums.low);
  _mm512_storeu_pd(out + 8, sums.high);
}

}  // namespace SWAPIO_ISA
}  // namespace swapio
