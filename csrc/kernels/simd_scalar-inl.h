// SPDX-License-Identifier: Apache-2.0
// One-lane vectors in plain C++: the definition that every wider level must equal bit for bit.
#include <math.h>
#include <string.h>

namespace swapio {
namespace SWAPIO_ISA {

constexpr int kWidth = 1;
using F = float;
using I = int32_t;
using M = bool;

SWAPIO_INLINE F load(const float* p) { return *p; }
SWAPIO_INLINE void store(float* p, F x) { *p = x; }
SWAPIO_INLINE F set1(float x) { return x; }
SWAPIO_INLINE F add(F a, F b) { return a + b; }
SWAPIO_INLINE F sub(F a, F b) { return a - b; }
SWAPIO_INLINE F mul(F a, F b) { return a * b; }
SWAPIO_INLINE F div(F a, F b) { return a / b; }
SWAPIO_INLINE F sqrt(F a) { return ::sqrtf(a); }
SWAPIO_INLINE M lt(F a, F b) { return a < b; }
SWAPIO_INLINE M not_lt(F a, F b) { return !(a < b); }
SWAPIO_INLINE M eq(F a, F b) { return a == b; }
SWAPIO_INLINE M is_nan(F a) { return a != a; }
SWAPIO_INLINE M both(M a, M b) { return a && b; }
SWAPIO_INLINE M either(M a, M b) { return a || b; }
SWAPIO_INLINE F select(M m, F yes, F no) { return m ? yes : no; }
SWAPIO_INLINE bool any(M m) { return m; }
SWAPIO_INLINE uint32_t mask_bits(M m) { return m ? 1u : 0u; }

SWAPIO_INLINE I bits(F x) {
  I b;
  memcpy(&b, &x, sizeof b);
  return b;
}
SWAPIO_INLINE F from_bits(I b) {
  F x;
  memcpy(&x, &b, sizeof x);
  return x;
}
SWAPIO_INLINE F abs(F x) { return from_bits(bits(x) & 0x7fffffff); }
SWAPIO_INLINE I iset1(int32_t x) { return x; }
SWAPIO_INLINE I iload(const int32_t* p) { return *p; }
SWAPIO_INLINE I iadd(I a, I b) {
  return static_cast<I>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
SWAPIO_INLINE I isub(I a, I b) {
  return static_cast<I>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}
SWAPIO_INLINE I imul(I a, I b) {
  return static_cast<I>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
}
SWAPIO_INLINE I iand(I a, I b) { return a & b; }
SWAPIO_INLINE I ixor(I a, I b) { return a ^ b; }
template <int N>
SWAPIO_INLINE I ishr(I a) {
  return static_cast<I>(static_cast<uint32_t>(a) >> N);
}
template <int N>
SWAPIO_INLINE I ishl(I a) {
  return static_cast<I>(static_cast<uint32_t>(a) << N);
}
SWAPIO_INLINE M ieq(I a, I b) { return a == b; }
SWAPIO_INLINE I iota() { return 0; }

// Zero-extended 16-bit lanes, sign-extended ones, and the lower halves back.
SWAPIO_INLINE I load_u16(const uint16_t* p) { return *p; }
SWAPIO_INLINE I load_i16(const int16_t* p) { return *p; }
SWAPIO_INLINE void store_u16(uint16_t* p, I x) { *p = static_cast<uint16_t>(x); }

SWAPIO_INLINE F load_f16(const uint16_t* p) {
  const uint32_t h = *p;
  const uint32_t sign = (h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t fraction = h & 0x3ffu;
  if (exponent == 0x1f) {  // a quiet nan, as the hardware conversion gives
    const uint32_t quiet = fraction ? 0x400000u : 0u;
    return from_bits(static_cast<I>(sign | 0x7f800000u | quiet | (fraction << 13)));
  }
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact
    return from_bits(static_cast<I>(
        sign | static_cast<uint32_t>(bits(static_cast<float>(fraction) * 5.9604644775390625e-8f))));
  }
  return from_bits(static_cast<I>(sign | ((exponent + 112) << 23) | (fraction << 13)));
}

// Round to nearest even; x is no nan other than the canonical one.
SWAPIO_INLINE void store_f16(uint16_t* p, F x) {
  const uint32_t b = static_cast<uint32_t>(bits(x));
  const uint32_t sign = (b >> 16) & 0x8000u;
  const uint32_t magnitude = b & 0x7fffffffu;
  uint32_t h;
  if (magnitude > 0x7f800000u) {
    h = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // at or above 65520: rounds to infinity
    h = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to units of 2^-24
    const float rounded = from_bits(static_cast<I>(magnitude)) + 0.5f;
    h = static_cast<uint32_t>(bits(rounded)) - 0x3f000000u;
  } else {
    h = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  *p = static_cast<uint16_t>(sign | h);
}

SWAPIO_INLINE void stream_u16(uint16_t* p, I x) { store_u16(p, x); }
SWAPIO_INLINE void stream_f16(uint16_t* p, F x) { store_f16(p, x); }
SWAPIO_INLINE void stream_f32(float* p, F x) { store(p, x); }
SWAPIO_INLINE void end_streams() {}

SWAPIO_INLINE void prefetch_read(const void*) {}
SWAPIO_INLINE void prefetch_write(const void*) {}

// kSumLanes float64 sums; block k of kWidth elements goes to the lanes k * kWidth mod kSumLanes.
struct SquareSums {
  double lane[kSumLanes];
};
SWAPIO_INLINE void clear(SquareSums& sums) {
  for (int i = 0; i < kSumLanes; i++) sums.lane[i] = 0.0;
}
SWAPIO_INLINE void accumulate(SquareSums& sums, int first, F x) {
  const double d = static_cast<double>(x);
  sums.lane[first] += d * d;
}
SWAPIO_INLINE void lanes(const SquareSums& sums, double* out) {
  for (int i = 0; i < kSumLanes; i++) out[i] = sums.lane[i];
}

}  // namespace SWAPIO_ISA
}  // namespace swapio
