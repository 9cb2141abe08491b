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

// Half a page of fp32 ahead (and the hardware prefetchers stop at page boundaries). Measured on 2
// and on 16 cores: 17 and 33 % faster than none; 256 to 1024 elements are alike.
constexpr int64_t kPrefetchNumel = SWAPIO_PREFETCH_NUMEL;

struct Coefficients {
  F scale, new_scale, b1, c1, b2, c2, decay, l2, step_size, r2, eps, inv_b1, inv_b2, inv_decay;
};

SWAPIO_INLINE Coefficients broadcast(const AdamConstants& c) {
  return {set1(c.scale), set1(c.new_scale), set1(c.b1),     set1(c.c1),        set1(c.b2),
          set1(c.c2),    set1(c.decay),     set1(c.l2),     set1(c.step_size), set1(c.r2),
          set1(c.eps),   set1(c.inv_b1),    set1(c.inv_b2), set1(c.inv_decay)};
}

struct State {
  F p, m, v;
};

SWAPIO_INLINE void make_canonical(State& s) {
  s.p = canonical(s.p);
  s.m = canonical(s.m);
  s.v = canonical(s.v);
}

SWAPIO_INLINE F denominator(F v, const Coefficients& k) { return add(mul(sqrt(v), k.r2), k.eps); }

struct Step {
  SWAPIO_INLINE void apply(State& s, F g, const Coefficients& k, const AdamConstants& c) {
    g = mul(g, k.scale);
    if (c.use_l2) g = add(g, mul(k.l2, s.p));
    s.m = add(mul(k.b1, s.m), mul(k.c1, g));
    s.v = add(mul(k.b2, s.v), mul(mul(k.c2, g), g));
    s.p = sub(mul(s.p, k.decay), div(mul(k.step_size, s.m), denominator(s.v, k)));
    // p is nan wherever m or v is, so one test covers all three.
    if (any(is_nan(s.p))) make_canonical(s);
  }
};

// From the state after a step on so * g to the state after a step on sn * g.
//
// An element whose v is exactly what the step makes of v = 0 has no visible history (the first
// step, a row touched for the first time): it gets the direct step's v, and m likewise. The general
// formula would leave v to cancellation there.
struct Rescale {
  SWAPIO_INLINE void apply(State& s, F g, const Coefficients& k, const AdamConstants&) {
    const F g_old = mul(g, k.scale), g_new = mul(g, k.new_scale);
    const F m_first = mul(k.c1, g_old);
    const F v_first = mul(mul(k.c2, g_old), g_old), v_bound = mul(mul(k.c2, g_new), g_new);
    const F m_moved = add(s.m, mul(k.c1, sub(g_new, g_old)));
    const F v_moved = add(s.v, sub(v_bound, v_first));
    const M fresh = eq(s.v, v_first);
    const F m = select(both(fresh, eq(s.m, m_first)), mul(k.c1, g_new), m_moved);
    // A nan in v_moved fails the comparison and stays.
    const F v = select(either(fresh, lt(v_moved, v_bound)), v_bound, v_moved);
    s = {sub(s.p, mul(k.step_size, update_difference(m, v, s, k))), m, v};
    if (any(is_nan(s.p))) make_canonical(s);
  }

  // U(m, v) - U(s.m, s.v) with one division. Where the product of the denominators is far from 1 or
  // the quotient overflows, intermediate values may have left fp32's normal range: two divisions.
  // (Within the range, a product that underflows is off by 2^-149, the result by 2^-89 at most.)
  SWAPIO_INLINE F update_difference(F m, F v, const State& s, const Coefficients& k) {
    const F d_new = denominator(v, k), d_old = denominator(s.v, k);
    const F product = mul(d_new, d_old);
    const F fast = div(sub(mul(m, d_old), mul(s.m, d_new)), product);
    const M far = either(lt(product, set1(0x1p-60f)), lt(set1(0x1p60f), product));
    const M bad = either(far, not_lt(abs(fast), from_bits(iset1(0x7f800000))));
    if (!any(bad)) return fast;
    return select(bad, sub(div(m, d_new), div(s.m, d_old)), fast);
  }
};

// The state before the step, algebraically: not bit exact, and lost where v overflowed.
struct Rollback {
  SWAPIO_INLINE void apply(State& s, F g, const Coefficients& k, const AdamConstants&) {
    g = mul(g, k.scale);
    const F update = div(mul(k.step_size, s.m), denominator(s.v, k));
    const F p = mul(add(s.p, update), k.inv_decay);
    const F m = mul(sub(s.m, mul(k.c1, g)), k.inv_b1);
    const F v_signed = mul(sub(s.v, mul(mul(k.c2, g), g)), k.inv_b2);
    const F zero = set1(0.0f);
    const F v = select(lt(v_signed, zero), zero, v_signed);
    s = {p, m, v};
    make_canonical(s);
  }
};

// A piece with typed pointers; the arrays a form does not have are null and never touched.
template <class P, class S, class G>
struct Arrays {
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

// What a block needs beside its arrays.
struct Context {
  const AdamConstants& constants;
  uint64_t first_position;  // of element 0 of the arrays
  uint64_t noise_key;
  bool streams;  // `out` goes past the caches
  bool is_away;  // so do the fp32 results: they go elsewhere, to lines that were not read
  Ties& ties;

  inline __attribute__((always_inline)) uint64_t position(int64_t i) const {
    return first_position + static_cast<uint64_t>(i);
  }
};

// Stochastic rounding: a hash of the position (keyed by seed, step and the position's upper half)
// is added below the bf16 mantissa, and what is below it is cut off. A canonical nan stays one: its
// mantissa is clear there.
SWAPIO_INLINE F add_noise(F x, uint64_t noise_key, uint64_t position) {
  const I key = iset1(static_cast<int32_t>(static_cast<uint32_t>(noise_key)));
  const I second_key = iset1(static_cast<int32_t>(static_cast<uint32_t>(noise_key >> 32)));
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
  template <class A>
  SWAPIO_INLINE F load_at(const A& a, int64_t i, const Context&) {
    return Fp32::load(a.p + i);
  }
  template <class A>
  SWAPIO_INLINE void store_at(const A& a, int64_t i, F x, const Context& context) {
    store_out(a.out + i, x, context);
    Fp32::put(a.p_to + i, x, context.is_away);
  }
  SWAPIO_INLINE void store_out(uint16_t* out, F x, const Context& context) {
    if (context.constants.out == kOutNone) return;
    const bool is_bf16 = context.constants.out == kOutBf16;
    if (context.streams) {
      is_bf16 ? stream_u16(out, round_to_bf16(x)) : stream_f16(out, x);
    } else {
      is_bf16 ? Bf16::store(out, x) : Fp16::store(out, x);
    }
  }
};

struct MasterSplit : Bf16 {
  template <class A>
  SWAPIO_INLINE F load_at(const A& a, int64_t i, const Context& context) {
    return join_master(load_u16(a.p + i), load_i16(a.low + i), context.position(i), context.ties);
  }
  template <class A>
  SWAPIO_INLINE void store_at(const A& a, int64_t i, F x, const Context& context) {
    split_master(x, a.p_to + i, a.low_to + i, context.position(i), context.ties);
  }
};

struct MasterBf16 : Bf16 {
  template <class A>
  SWAPIO_INLINE F load_at(const A& a, int64_t i, const Context&) {
    return Bf16::load(a.p + i);
  }
  template <class A>
  SWAPIO_INLINE void store_at(const A& a, int64_t i, F x, const Context& context) {
    if (context.constants.stochastic) x = add_noise(x, context.noise_key, context.position(i));
    Bf16::store(a.p_to + i, x);
  }
};

struct MasterFp16 : Fp16 {
  template <class A>
  SWAPIO_INLINE F load_at(const A& a, int64_t i, const Context&) {
    return Fp16::load(a.p + i);
  }
  template <class A>
  SWAPIO_INLINE void store_at(const A& a, int64_t i, F x, const Context&) {
    Fp16::store(a.p_to + i, x);
  }
};

template <class Op, class P, class S, class G>
SWAPIO_INLINE void adam_block(const Arrays<P, S, G>& a, int64_t i, const Coefficients& k,
                              const Context& context) {
  State state = {P::load_at(a, i, context), S::load(a.m + i), S::load(a.v + i)};
  Op::apply(state, G::load(a.g + i), k, context.constants);
  P::store_at(a, i, state.p, context);
  S::put(a.m_to + i, state.m, context.is_away);
  S::put(a.v_to + i, state.v, context.is_away);
}

// The last elements, fewer than kWidth: the same block over zero-filled copies.
template <class Op, class P, class S, class G>
static void adam_partial(const Arrays<P, S, G>& a, int64_t i, int64_t numel, const Coefficients& k,
                         const Context& outer) {
  typename P::T p[kWidth] = {};
  typename G::T g[kWidth] = {};
  typename S::T m[kWidth] = {}, v[kWidth] = {};
  int16_t low[kWidth] = {};
  uint16_t low_to[kWidth] = {}, out[kWidth] = {};
  const size_t n = static_cast<size_t>(numel - i);
  memcpy(p, a.p + i, n * sizeof *p);
  memcpy(g, a.g + i, n * sizeof *g);
  memcpy(m, a.m + i, n * sizeof *m);
  memcpy(v, a.v + i, n * sizeof *v);
  if (a.low != nullptr) memcpy(low, a.low + i, n * sizeof *low);
  const Context context = {outer.constants, outer.position(i), outer.noise_key, false,
                           false,           outer.ties};
  adam_block<Op, P, S, G>({p, g, m, v, low, p, m, v, low_to, out}, 0, k, context);
  memcpy(a.p_to + i, p, n * sizeof *p);
  memcpy(a.m_to + i, m, n * sizeof *m);
  memcpy(a.v_to + i, v, n * sizeof *v);
  if (a.low_to != nullptr) memcpy(a.low_to + i, low_to, n * sizeof *low_to);
  if (a.out != nullptr) memcpy(a.out + i, out, n * sizeof *out);
}

// A result that goes to other memory than it came from, and starts at a cache line.
static bool is_elsewhere(const void* from, const void* to) {
  return from != to && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}

template <class Op, class P, class S, class G>
static void adam_run(const AdamPiece& piece, const AdamConstants& constants, Ties& ties) {
  using PT = typename P::T;
  using ST = typename S::T;
  const Arrays<P, S, G> a = {
      static_cast<const PT*>(piece.param),    static_cast<const typename G::T*>(piece.grad),
      static_cast<const ST*>(piece.exp_avg),  static_cast<const ST*>(piece.exp_avg_sq),
      static_cast<const int16_t*>(piece.low), static_cast<PT*>(piece.param_to),
      static_cast<ST*>(piece.exp_avg_to),     static_cast<ST*>(piece.exp_avg_sq_to),
      static_cast<uint16_t*>(piece.low_to),   static_cast<uint16_t*>(piece.out)};
  const Coefficients k = broadcast(constants);
  const bool streams = constants.streams && reinterpret_cast<uintptr_t>(a.out) % 32 == 0;
  const bool is_away = constants.streams && is_elsewhere(a.p, a.p_to) &&
                       is_elsewhere(a.m, a.m_to) && is_elsewhere(a.v, a.v_to);
  const Context context = {constants, piece.position, piece.noise_key, streams, is_away, ties};
  const int64_t numel = piece.numel;
  int64_t i = 0;
  for (; i + kWidth <= numel; i += kWidth) {
    prefetch_write(a.p + i + kPrefetchNumel);
    prefetch_write(a.m + i + kPrefetchNumel);
    prefetch_write(a.v + i + kPrefetchNumel);
    prefetch_read(a.g + i + kPrefetchNumel);
    adam_block<Op, P, S, G>(a, i, k, context);
  }
  if (streams || is_away) end_streams();
  if (i < numel) adam_partial<Op, P, S, G>(a, i, numel, k, context);
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
