// SPDX-License-Identifier: Apache-2.0
// What the processor and the operating system support, and the floating-point environment.
#ifndef SWAPIO_KERNELS_CPU_H_
#define SWAPIO_KERNELS_CPU_H_

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace swapio {

#if defined(__x86_64__)
struct X86Features {
  bool avx2 = false;    // with F16C
  bool avx512 = false;  // F, BW, DQ, VL
  bool fma = false;
};

inline X86Features detect_x86() {
  X86Features found;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool os_saves_ymm_known = (c >> 27) & 1u;  // OSXSAVE: XGETBV may be executed
  const bool avx = (c >> 28) & 1u, f16c = (c >> 29) & 1u;
  found.fma = (c >> 12) & 1u;
  if (!os_saves_ymm_known || !avx) return found;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const unsigned ymm = 0x6, zmm = 0xe6;  // XCR0: SSE and AVX state; opmask and ZMM state as well
  found.avx2 = (low & ymm) == ymm && ((b >> 5) & 1u) && f16c;
  const unsigned wanted = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  found.avx512 = found.avx2 && (low & zmm) == zmm && (b & wanted) == wanted;
  return found;
}
#endif

// Round to nearest even, subnormals kept (no FTZ, no DAZ), exceptions masked, for this scope.
// torch.set_flush_denormal(True) sets FTZ and DAZ in the thread that calls it.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatEnvironment() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_ = 0;
#else
  FloatEnvironment() {}
  ~FloatEnvironment() {}
#endif
 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

}  // namespace swapio

#endif  // SWAPIO_KERNELS_CPU_H_
