// SPDX-License-Identifier: Apache-2.0
// How values lie in memory: fp32, bf16, fp16, and the split master. Included once per ISA, after
// that ISA's simd header.
//
// Split master. The fp32 master minus its round-to-nearest-even bf16 lies in [-32768, 32768] units
// of the lower half. An int16 holds all of it but one end: only ties reach the ends, and in a tie
// the bf16 is even, so the code (bf16 even, low == -32768) is the only ambiguous one. It means
// -32768 unless the element's position is in the sorted list of ties; then it means +32768.
// (Infinities have low 0; a finite master that rounds to infinity has bf16 infinity and a negative
// low. Neither needs a list.)

namespace swapio {
namespace SWAPIO_ISA {

SWAPIO_INLINE F canonical(F x) { return select(is_nan(x), from_bits(iset1(0x7fc00000)), x); }

// Upper halves of x rounded to nearest even. No nan but the canonical one may come in: adding the
// rounding term to another could carry into the sign.
SWAPIO_INLINE I round_to_bf16(F x) {
  const I b = bits(x);
  return ishr<16>(iadd(iadd(b, iset1(0x7fff)), iand(ishr<16>(b), iset1(1))));
}

struct Fp32 {
  using T = float;
  SWAPIO_INLINE F load(const T* p) { return SWAPIO_ISA::load(p); }
  SWAPIO_INLINE void store(T* p, F x) { SWAPIO_ISA::store(p, x); }
  SWAPIO_INLINE void put(T* p, F x, bool streams) { streams ? stream_f32(p, x) : store(p, x); }
  SWAPIO_INLINE F quantize(F x) { return x; }
};

struct Bf16 {
  using T = uint16_t;
  SWAPIO_INLINE F load(const T* p) { return from_bits(ishl<16>(load_u16(p))); }
  SWAPIO_INLINE void store(T* p, F x) { store_u16(p, round_to_bf16(x)); }
  SWAPIO_INLINE void put(T* p, F x, bool) { store(p, x); }
};

struct Fp16 {
  using T = uint16_t;
  SWAPIO_INLINE F load(const T* p) { return load_f16(p); }
  SWAPIO_INLINE void store(T* p, F x) { store_f16(p, x); }
  SWAPIO_INLINE void put(T* p, F x, bool) { store(p, x); }
};

// Index of the first entry of ties.in that is not below `position`.
SWAPIO_INLINE int64_t lower_bound(const Ties& ties, uint64_t position) {
  int64_t low = 0, high = ties.num_in;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (ties.in[middle] < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Adds 65536 (from -32768 to +32768) in the lanes whose position is listed.
SWAPIO_INLINE I resolve_ties(I master, uint32_t ambiguous, uint64_t position, const Ties& ties) {
  int32_t fix[kWidth] = {};
  for (int lane = 0; lane < kWidth; lane++) {
    if (!((ambiguous >> lane) & 1u)) continue;
    const uint64_t wanted = position + static_cast<uint64_t>(lane);
    const int64_t at = lower_bound(ties, wanted);
    if (at < ties.num_in && ties.in[at] == wanted) fix[lane] = 0x10000;
  }
  return iadd(master, iload(fix));
}

SWAPIO_INLINE F join_master(I high, I low, uint64_t position, const Ties& ties) {
  I master = iadd(ishl<16>(high), low);
  if (ties.num_in > 0) {
    const M even = ieq(iand(high, iset1(1)), iset1(0));
    const M ambiguous = both(even, ieq(low, iset1(-32768)));
    if (any(ambiguous)) master = resolve_ties(master, mask_bits(ambiguous), position, ties);
  }
  return from_bits(master);
}

// x is canonical.
SWAPIO_INLINE void split_master(F x, uint16_t* high_to, uint16_t* low_to, uint64_t position,
                                Ties& ties) {
  const I high = round_to_bf16(x);
  const I low = isub(bits(x), ishl<16>(high));
  store_u16(high_to, high);
  store_u16(low_to, low);
  const M tie = ieq(low, iset1(32768));
  if (any(tie)) {
    const uint32_t mask = mask_bits(tie);
    for (int lane = 0; lane < kWidth; lane++) {
      if ((mask >> lane) & 1u) {
        ties.out[ties.num_out++] = static_cast<uint32_t>(position + static_cast<uint64_t>(lane));
      }
    }
  }
}

}  // namespace SWAPIO_ISA
}  // namespace swapio
