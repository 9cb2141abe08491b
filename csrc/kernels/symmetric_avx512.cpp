// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#define SWAPIO_ISA avx512

namespace swapio {
namespace SWAPIO_ISA {
namespace {  // isa_*.cpp have their own operations of these names

using Vector = __m512;
constexpr int kLanes = 16;
constexpr int kBlockRows = 8;  // 24 sums, 3 columns and a row of the 32 registers

inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector fill(float value) { return _mm512_set1_ps(value); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace SWAPIO_ISA
}  // namespace swapio

#include "symmetric-inl.h"
