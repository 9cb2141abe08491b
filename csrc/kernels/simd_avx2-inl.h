// SPDX-License-Identifier: Apache-2.0
// 16 lanes in two AVX2 registers: one block is one cache line of fp32, as at the other levels.
// (FMA is not used: a fused multiply-add rounds once where the scalar level rounds twice.)
#include <immintrin.h>
#include <string.h>

namespace swapio {
namespace SWAPIO_ISA {

constexpr int kWidth = 16;
struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct M {
  __m256 a, b;
};

SWAPIO_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SWAPIO_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
SWAPIO_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SWAPIO_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
SWAPIO_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
SWAPIO_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
SWAPIO_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
SWAPIO_INLINE F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
SWAPIO_INLINE M lt(F x, F y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
SWAPIO_INLINE M not_lt(F x, F y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ), _mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ)};
}
SWAPIO_INLINE M eq(F x, F y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
SWAPIO_INLINE M is_nan(F x) {
  return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)};
}
SWAPIO_INLINE M both(M x, M y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
SWAPIO_INLINE M either(M x, M y) { return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)}; }
SWAPIO_INLINE F select(M m, F yes, F no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
SWAPIO_INLINE uint32_t mask_bits(M m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) |
         (static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8);
}
SWAPIO_INLINE bool any(M m) { return _mm256_movemask_ps(_mm256_or_ps(m.a, m.b)) != 0; }

SWAPIO_INLINE I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
SWAPIO_INLINE F from_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
SWAPIO_INLINE I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SWAPIO_INLINE I iload(const int32_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
SWAPIO_INLINE I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
SWAPIO_INLINE I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
SWAPIO_INLINE I imul(I x, I y) {
  return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
SWAPIO_INLINE I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
SWAPIO_INLINE I ixor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
SWAPIO_INLINE F abs(F x) { return from_bits(iand(bits(x), iset1(0x7fffffff))); }
template <int N>
SWAPIO_INLINE I ishr(I x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
SWAPIO_INLINE I ishl(I x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
SWAPIO_INLINE M ieq(I x, I y) {
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.a, y.a)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(x.b, y.b))};
}
SWAPIO_INLINE I iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

SWAPIO_INLINE __m128i load_8x16(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
SWAPIO_INLINE I load_u16(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(load_8x16(p)), _mm256_cvtepu16_epi32(load_8x16(p + 8))};
}
SWAPIO_INLINE I load_i16(const int16_t* p) {
  return {_mm256_cvtepi16_epi32(load_8x16(p)), _mm256_cvtepi16_epi32(load_8x16(p + 8))};
}
SWAPIO_INLINE __m256i pack_u16(I x) {
  const __m256i mask = _mm256_set1_epi32(0xffff);  // the pack saturates, so cut to 16 bits first
  const __m256i packed =
      _mm256_packus_epi32(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
  return _mm256_permute4x64_epi64(packed, 0xd8);  // undo the pack's lane order
}
SWAPIO_INLINE void store_u16(uint16_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_u16(x));
}
SWAPIO_INLINE F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_8x16(p)), _mm256_cvtph_ps(load_8x16(p + 8))};
}
SWAPIO_INLINE void store_f16(uint16_t* p, F x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Past the caches, for arrays that are only written: p is a multiple of 32 bytes.
SWAPIO_INLINE void stream_u16(uint16_t* p, I x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), pack_u16(x));
}
SWAPIO_INLINE void stream_f16(uint16_t* p, F x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_stream_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_stream_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SWAPIO_INLINE void stream_f32(float* p, F x) {
  _mm256_stream_ps(p, x.a);
  _mm256_stream_ps(p + 8, x.b);
}
SWAPIO_INLINE void end_streams() { _mm_sfence(); }

SWAPIO_INLINE void prefetch_read(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
SWAPIO_INLINE void prefetch_write(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

struct SquareSums {
  __m256d sum[4];
};
SWAPIO_INLINE void clear(SquareSums& sums) {
  for (int i = 0; i < 4; i++) sums.sum[i] = _mm256_setzero_pd();
}
SWAPIO_INLINE void accumulate(SquareSums& sums, int, F x) {
  const __m256d d[4] = {
      _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)),
      _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1))};
  for (int i = 0; i < 4; i++) sums.sum[i] = _mm256_add_pd(sums.sum[i], _mm256_mul_pd(d[i], d[i]));
}
SWAPIO_INLINE void lanes(const SquareSums& sums, double* out) {
  for (int i = 0; i < 4; i++) _mm256_storeu_pd(out + 4 * i, sums.sum[i]);
}

}  // namespace SWAPIO_ISA
}  // namespace swapio
