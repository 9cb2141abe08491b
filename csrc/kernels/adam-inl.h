// SPDX-License-Identifier: Apache-2.0
// Adam, its rescale and its rollback, one element at a time. Included once per ISA.
//
// fl() marks each rounding to fp32; nothing is fused, so every level gives the same bits:
//
//   g  = fl(scale * g)                      after promotion to fp32; maximize negates scale
//   g  = fl(g + fl(l2 * p))                 L2 decay only
//   m' = fl(fl(b1 * m) + fl(c1 * g))        c1 = 1 - beta1
//   v' = fl(fl(b2 * v) + fl(fl(c2 * g) * g))
//   d  = fl(fl(fl(sqrt(v')) * r2) + eps)    r2 = 1 / sqrt(1 - beta2^t)
//   p' = fl(fl(decay * p) - fl(fl(step_size * m') / d))
//
// The constants are computed in double and rounded once. As in torch, eps is added after the bias
// correction, and decoupled decay multiplies the parameter before the update. Every nan that is
// stored is 0x7fc00000, so that results do not depend on the operand order a compiler chose.

namespace swapio {
namespace SWAPIO_ISA {

// About two 4 KiB pages of fp32 ahead: the hardware prefetchers stop at page boundaries.
constexpr int64_t kPrefetchNumel = SWAPIO_PREFETCH_NUMEL;

struct Coefficients {
  F scale, new_scale, b1, c1, b2, c2, decay, l2, step_size, r2, eps, inv_b1, inv_b2, inv_decay;
};

static inline Coefficients broadcast(const AdamConstants& c) {
  return {set1(c.scale), set1(c.new_scale), set1(c.b1),     set1(c.c1),        set1(c.b2),
          set1(c.c2),    set1(c.decay),     set1(c.l2),     set1(c.step_size), set1(c.r2),
          set1(c.eps),   set1(c.inv_b1),    set1(c.inv_b2), set1(c.inv_decay)};
}

struct State {
  F p, m, v;
};

static inline F denominator(F v, const Coefficients& k) { return add(mul(sqrt(v), k.r2), k.eps); }

struct Step {
  static constexpr bool kRescales = false;
  static inline State apply(State s, F g, const Coefficients& k, const AdamConstants& c) {
    g = mul(g, k.scale);
    if (c.use_l2) g = add(g, mul(k.l2, s.p));
    const F m = add(mul(k.b1, s.m), mul(k.c1, g));
    const F v = add(mul(k.b2, s.v), mul(mul(k.c2, g), g));
    const F p = sub(mul(s.p, k.decay), div(mul(k.step_size, m), denominator(v, k)));
    // p is nan wherever m or v is, so one test covers all three.
    if (any(is_nan(p))) return {canonical(p), canonical(m), canonical(v)};
    return {p, m, v};
  }
};

// From the state after a step on so * g to the state after a step on sn * g.
//
// An element whose v is exactly what the step makes of v = 0 has no visible history (the first
// step, a row touched for the first time): it gets the direct step's v, and m likewise. The general
// formula would leave v to cancellation there.
struct Rescale {
  static constexpr bool kRescales = true;
  static inline State apply(State s, F g, const Coefficients& k, const AdamConstants&) {
    const F g_old = mul(g, k.scale), g_new = mul(g, k.new_scale);
    const F m_first = mul(k.c1, g_old);
    const F v_first = mul(mul(k.c2, g_old), g_old), v_bound = mul(mul(k.c2, g_new), g_new);
    const F m_moved = add(s.m, mul(k.c1, sub(g_new, g_old)));
    const F v_moved = add(s.v, sub(v_bound, v_first));
    const M fresh = eq(s.v, v_first);
    const F m = select(both(fresh, eq(s.m, m_first)), mul(k.c1, g_new), m_moved);
    // A nan in v_moved fails the comparison and stays.
    const F v = select(either(fresh, lt(v_moved, v_bound)), v_bound, v_moved);
    const F p = sub(s.p, mul(k.step_size, update_difference(m, v, s, k)));
    if (any(is_nan(p))) return {canonical(p), canonical(m), canonical(v)};
    return {p, m, v};
  }

  // U(m, v) - U(s.m, s.v) with one division. Lanes where the products leave fp32's normal range
  // take two.
  static inline F update_difference(F m, F v, const State& s, const Coefficients& k) {
    const F d_new = denominator(v, k), d_old = denominator(s.v, k);
    const F numerator = sub(mul(m, d_old), mul(s.m, d_new));
    const F product = mul(d_new, d_old);
    const F huge = from_bits(iset1(0x7f7fffff)), tiny = from_bits(iset1(0x00800000));
    const F size = abs(numerator);
    const M small = either(lt(product, tiny), both(lt(size, tiny), lt(set1(0.0f), size)));
    const M large = either(lt(huge, product), either(lt(huge, size), is_nan(size)));
    const M bad = either(small, large);
    const F fast = div(numerator, product);
    if (!any(bad)) return fast;
    return select(bad, sub(div(m, d_new), div(s.m, d_old)), fast);
  }
};

// The state before the step, algebraically: not bit exact, and lost where v overflowed.
struct Rollback {
  static constexpr bool kRescales = false;
  static inline State apply(State s, F g, const Coefficients& k, const AdamConstants&) {
    g = mul(g, k.scale);
    const F update = div(mul(k.step_size, s.m), denominator(s.v, k));
    const F p = mul(add(s.p, update), k.inv_decay);
    const F m = mul(sub(s.m, mul(k.c1, g)), k.inv_b1);
    const F v_signed = mul(sub(s.v, mul(mul(k.c2, g), g)), k.inv_b2);
    const F zero = set1(0.0f);
    const F v = select(lt(v_signed, zero), zero, v_signed);
    return {canonical(p), canonical(m), canonical(v)};
  }
};

// Views of a piece with typed, advancing pointers.
template <class P, class S, class G>
struct Cursor {
  const typename P::T* p;
  const typename G::T* g;
  const typename S::T* m;
  const typename S::T* v;
  const int16_t* low;
  typename P::T* p_to;
  typename S::T* m_to;
  typename S::T* v_to;
  uint16_t* low_to;
  uint16_t* out;
};

// Stochastic rounding: a hash of the position (keyed by seed, step and the position's upper half)
// is added below the bf16 mantissa, and what is below it is cut off. A canonical nan stays one: its
// mantissa is clear there.
static inline F add_noise(F x, const AdamPiece& piece, uint64_t position) {
  const I key = iset1(static_cast<int32_t>(static_cast<uint32_t>(piece.noise_key)));
  const I second_key = iset1(static_cast<int32_t>(static_cast<uint32_t>(piece.noise_key >> 32)));
  I r = iadd(iset1(static_cast<int32_t>(static_cast<uint32_t>(position))), iota());
  r = ixor(r, key);
  r = imul(ixor(r, ishr<16>(r)), iset1(0x7feb352d));
  r = iadd(r, second_key);
  r = imul(ixor(r, ishr<15>(r)), iset1(static_cast<int32_t>(0x846ca68bu)));
  r = iand(ixor(r, ishr<16>(r)), iset1(0xffff));
  return from_bits(ishl<16>(ishr<16>(iadd(bits(x), r))));
}

// The four masters: how the value to update is loaded, and stored with its low-precision copy.
struct MasterFp32 : Fp32 {
  template <class C>
  static inline F load_from(const C& c, uint64_t, const Ties&) {
    return SWAPIO_ISA::load(c.p);
  }
  template <class C>
  static inline void store_to(const C& c, F x, const AdamPiece&, const AdamConstants& k, uint64_t,
                              Ties&) {
    if (k.out == kOutBf16) {
      // Split and separate masters agree on nan because both are canonical.
      Bf16::store(c.out, x);
    } else if (k.out == kOutFp16) {
      Fp16::store(c.out, x);
    }
    SWAPIO_ISA::store(c.p_to, x);
  }
};

struct MasterSplit : Bf16 {
  template <class C>
  static inline F load_from(const C& c, uint64_t position, const Ties& ties) {
    return join_master(load_u16(c.p), load_i16(c.low), position, ties);
  }
  template <class C>
  static inline void store_to(const C& c, F x, const AdamPiece&, const AdamConstants&,
                              uint64_t position, Ties& ties) {
    split_master(x, c.p_to, c.low_to, position, ties);
  }
};

struct MasterBf16 : Bf16 {
  template <class C>
  static inline F load_from(const C& c, uint64_t, const Ties&) {
    return Bf16::load(c.p);
  }
  template <class C>
  static inline void store_to(const C& c, F x, const AdamPiece& piece, const AdamConstants& k,
                              uint64_t position, Ties&) {
    Bf16::store(c.p_to, k.stochastic ? add_noise(x, piece, position) : x);
  }
};

struct MasterFp16 : Fp16 {
  template <class C>
  static inline F load_from(const C& c, uint64_t, const Ties&) {
    return Fp16::load(c.p);
  }
  template <class C>
  static inline void store_to(const C& c, F x, const AdamPiece&, const AdamConstants&, uint64_t,
                              Ties&) {
    Fp16::store(c.p_to, x);
  }
};

template <class Op, class P, class S, class G>
static inline void adam_block(const Cursor<P, S, G>& c, const AdamPiece& piece,
                              const Coefficients& k, const AdamConstants& constants,
                              uint64_t position, Ties& ties) {
  const State before = {P::load_from(c, position, ties), S::load(c.m), S::load(c.v)};
  const State after = Op::apply(before, G::load(c.g), k, constants);
  P::store_to(c, after.p, piece, constants, position, ties);
  S::store(c.m_to, after.m);
  S::store(c.v_to, after.v);
}

template <class T>
static inline T* advance(T* p, int64_t numel) {
  return p == nullptr ? p : p + numel;
}

template <class P, class S, class G>
static inline Cursor<P, S, G> at(const AdamPiece& a, int64_t i) {
  return {advance(static_cast<const typename P::T*>(a.param), i),
          advance(static_cast<const typename G::T*>(a.grad), i),
          advance(static_cast<const typename S::T*>(a.exp_avg), i),
          advance(static_cast<const typename S::T*>(a.exp_avg_sq), i),
          advance(static_cast<const int16_t*>(a.low), i),
          advance(static_cast<typename P::T*>(a.param_to), i),
          advance(static_cast<typename S::T*>(a.exp_avg_to), i),
          advance(static_cast<typename S::T*>(a.exp_avg_sq_to), i),
          advance(static_cast<uint16_t*>(a.low_to), i),
          advance(static_cast<uint16_t*>(a.out), i)};
}

// Fewer than kWidth elements: the same block over zero-filled copies.
template <class Op, class P, class S, class G>
static void adam_partial(const Cursor<P, S, G>& c, int64_t numel, const AdamPiece& piece,
                         const Coefficients& k, const AdamConstants& constants, uint64_t position,
                         Ties& ties) {
  typename P::T p[kWidth] = {};
  typename G::T g[kWidth] = {};
  typename S::T m[kWidth] = {}, v[kWidth] = {};
  int16_t low[kWidth] = {};
  uint16_t low_to[kWidth] = {}, out[kWidth] = {};
  const size_t n = static_cast<size_t>(numel);
  memcpy(p, c.p, n * sizeof *p);
  memcpy(g, c.g, n * sizeof *g);
  memcpy(m, c.m, n * sizeof *m);
  memcpy(v, c.v, n * sizeof *v);
  if (c.low != nullptr) memcpy(low, c.low, n * sizeof *low);
  adam_block<Op, P, S, G>({p, g, m, v, low, p, m, v, low_to, out}, piece, k, constants, position,
                          ties);
  memcpy(c.p_to, p, n * sizeof *p);
  memcpy(c.m_to, m, n * sizeof *m);
  memcpy(c.v_to, v, n * sizeof *v);
  if (c.low_to != nullptr) memcpy(c.low_to, low_to, n * sizeof *low_to);
  if (c.out != nullptr) memcpy(c.out, out, n * sizeof *out);
}

template <class Op, class P, class S, class G>
static void adam_run(const AdamPiece& piece, const AdamConstants& constants, Ties& ties) {
  const Coefficients k = broadcast(constants);
  int64_t i = 0;
  for (; i + kWidth <= piece.numel; i += kWidth) {
    const Cursor<P, S, G> c = at<P, S, G>(piece, i);
    prefetch_write(c.p + kPrefetchNumel);
    prefetch_write(c.m + kPrefetchNumel);
    prefetch_write(c.v + kPrefetchNumel);
    prefetch_read(c.g + kPrefetchNumel);
    adam_block<Op, P, S, G>(c, piece, k, constants, piece.position + static_cast<uint64_t>(i),
                            ties);
  }
  if (i < piece.numel) {
    adam_partial<Op, P, S, G>(at<P, S, G>(piece, i), piece.numel - i, piece, k, constants,
                              piece.position + static_cast<uint64_t>(i), ties);
  }
}

template <class Op, class P, class S>
static void fill_grads(KernelTable& table, AdamOp op, Master master, Dtype state) {
  AdamFn* row = table.adam[op][master][state];
  row[kFp32] = adam_run<Op, P, S, Fp32>;
  row[kBf16] = adam_run<Op, P, S, Bf16>;
  row[kFp16] = adam_run<Op, P, S, Fp16>;
}

static void fill_adam(KernelTable& table) {
  fill_grads<Step, MasterFp32, Fp32>(table, kStep, kMasterFp32, kFp32);
  fill_grads<Step, MasterFp32, Bf16>(table, kStep, kMasterFp32, kBf16);
  fill_grads<Step, MasterSplit, Fp32>(table, kStep, kMasterSplit, kFp32);
  fill_grads<Step, MasterSplit, Bf16>(table, kStep, kMasterSplit, kBf16);
  fill_grads<Step, MasterBf16, Fp32>(table, kStep, kMasterBf16, kFp32);
  fill_grads<Step, MasterBf16, Bf16>(table, kStep, kMasterBf16, kBf16);
  fill_grads<Step, MasterFp16, Fp32>(table, kStep, kMasterFp16, kFp32);
  fill_grads<Step, MasterFp16, Fp16>(table, kStep, kMasterFp16, kFp16);
  fill_grads<Rescale, MasterFp32, Fp32>(table, kRescale, kMasterFp32, kFp32);
  fill_grads<Rescale, MasterSplit, Fp32>(table, kRescale, kMasterSplit, kFp32);
  fill_grads<Rollback, MasterFp32, Fp32>(table, kRollback, kMasterFp32, kFp32);
  fill_grads<Rollback, MasterSplit, Fp32>(table, kRollback, kMasterSplit, kFp32);
}

}  // namespace SWAPIO_ISA
}  // namespace swapio
