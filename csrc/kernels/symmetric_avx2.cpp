// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#define SWAPIO_ISA avx2

namespace swapio {
namespace SWAPIO_ISA {
namespace {  // isa_*.cpp have their own operations of these names

using Vector = __m256;
constexpr int kLanes = 8;
constexpr int kBlockRows = 4;  // 12 sums, 3 columns and a row: all 16 registers

inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector fill(float value) { return _mm256_set1_ps(value); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace SWAPIO_ISA
}  // namespace swapio

#include "symmetric-inl.h"
