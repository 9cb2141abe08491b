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

SWAPIO_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
SWAPIO_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
SWAPIO_INLINE F set1(float x) { return _mm512_set1_ps(x); }
SWAPIO_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
SWAPIO_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
SWAPIO_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
SWAPIO_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
SWAPIO_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
SWAPIO_INLINE M lt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
SWAPIO_INLINE M not_lt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
SWAPIO_INLINE M eq(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
SWAPIO_INLINE M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
SWAPIO_INLINE M both(M a, M b) { return static_cast<M>(a & b); }
SWAPIO_INLINE M either(M a, M b) { return static_cast<M>(a | b); }
SWAPIO_INLINE F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
SWAPIO_INLINE bool any(M m) { return m != 0; }
SWAPIO_INLINE uint32_t mask_bits(M m) { return m; }

SWAPIO_INLINE I bits(F x) { return _mm512_castps_si512(x); }
SWAPIO_INLINE F from_bits(I b) { return _mm512_castsi512_ps(b); }
SWAPIO_INLINE F abs(F x) {
  return from_bits(_mm512_and_si512(bits(x), _mm512_set1_epi32(0x7fffffff)));
}
SWAPIO_INLINE I iset1(int32_t x) { return _mm512_set1_epi32(x); }
SWAPIO_INLINE I iload(const int32_t* p) { return _mm512_loadu_si512(p); }
SWAPIO_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
SWAPIO_INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
SWAPIO_INLINE I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
SWAPIO_INLINE I iand(I a, I b) { return _mm512_and_si512(a, b); }
SWAPIO_INLINE I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
template <int N>
SWAPIO_INLINE I ishr(I a) {
  return _mm512_srli_epi32(a, N);
}
template <int N>
SWAPIO_INLINE I ishl(I a) {
  return _mm512_slli_epi32(a, N);
}
SWAPIO_INLINE M ieq(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
SWAPIO_INLINE I iota() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

SWAPIO_INLINE __m256i load_16x16(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
SWAPIO_INLINE I load_u16(const uint16_t* p) { return _mm512_cvtepu16_epi32(load_16x16(p)); }
SWAPIO_INLINE I load_i16(const int16_t* p) { return _mm512_cvtepi16_epi32(load_16x16(p)); }
SWAPIO_INLINE void store_u16(uint16_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
SWAPIO_INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_16x16(p)); }
SWAPIO_INLINE void store_f16(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Past the caches, for arrays that are only written: p is a multiple of 32 bytes.
SWAPIO_INLINE void stream_u16(uint16_t* p, I x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
SWAPIO_INLINE void stream_f16(uint16_t* p, F x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SWAPIO_INLINE void stream_f32(float* p, F x) { _mm512_stream_ps(p, x); }  // p: of 64 bytes
SWAPIO_INLINE void end_streams() { _mm_sfence(); }

SWAPIO_INLINE void prefetch_read(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
SWAPIO_INLINE void prefetch_write(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

struct SquareSums {
  __m512d low, high;
};
SWAPIO_INLINE void clear(SquareSums& sums) { sums.low = sums.high = _mm512_setzero_pd(); }
SWAPIO_INLINE void accumulate(SquareSums& sums, int, F x) {
  const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  const __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  sums.low = _mm512_add_pd(sums.low, _mm512_mul_pd(a, a));
  sums.high = _mm512_add_pd(sums.high, _mm512_mul_pd(b, b));
}
SWAPIO_INLINE void lanes(const SquareSums& sums, double* out) {
  _mm512_storeu_pd(out, sums.low);
  _mm512_storeu_pd(out + 8, sums.high);
}

}  // namespace SWAPIO_ISA
}  // namespace swapio
