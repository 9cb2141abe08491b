// SPDX-License-Identifier: Apache-2.0
// The Adam entry points: checks, constants, tiles.
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "dispatch.h"
#include "spans.h"
#include "ties.h"
#include "tiles.h"

namespace swapio {
namespace {

constexpr int64_t kTileNumel = 1 << 15;
constexpr uint64_t kMaxSplitPosition = uint64_t{1} << 32;  // ties are 32-bit positions
constexpr uint64_t kLineBytes = 64;
// From here on the low-precision copy is written past the caches: it is not read before the step is
// over, and a plain store would first read the line. Measured: 4 to 7 % of the step. A small call
// leaves it in the caches for whoever comes next; the limit is a guess.
constexpr int64_t kStreamNumel = 1 << 20;

[[noreturn]] void fail(const std::string& text) { throw std::invalid_argument(text); }

std::string at_span(int64_t index) { return "span " + std::to_string(index) + ": "; }

int element_bytes(Dtype dtype) { return dtype == kFp32 ? 4 : 2; }

int master_bytes(Master master) { return master == kMasterFp32 ? 4 : 2; }

void check_address(uint64_t address, int alignment, const char* name, int64_t index) {
  if (address == 0) fail(at_span(index) + "the form needs an address of " + name);
  if (address % static_cast<uint64_t>(alignment) != 0) {
    fail(at_span(index) + "the address of " + name + " is not a multiple of its element size");
  }
}

void check_span(const Span& span, const AdamForm& form, int64_t index, int64_t num_hypers) {
  if (span.numel < 0) fail(at_span(index) + "numel is negative");
  if (span.position < 0) fail(at_span(index) + "position is negative");
  if (span.position > INT64_MAX - span.numel) fail(at_span(index) + "position is too large");
  if (span.hyper < 0 || span.hyper >= num_hypers) {
    fail(at_span(index) + "hyper is " + std::to_string(span.hyper) + ", but there are " +
         std::to_string(num_hypers));
  }
  if (span.numel == 0) return;
  const int master = master_bytes(form.master), state = element_bytes(form.state);
  check_address(span.param, master, "param", index);
  check_address(span.grad, element_bytes(form.grad), "grad", index);
  check_address(span.exp_avg, state, "exp_avg", index);
  check_address(span.exp_avg_sq, state, "exp_avg_sq", index);
  if (form.out != kOutNone) check_address(span.out, 2, "out", index);
  if (form.master == kMasterSplit) {
    check_address(span.low, 2, "low", index);
    const uint64_t end = static_cast<uint64_t>(span.position) + static_cast<uint64_t>(span.numel);
    if (end > kMaxSplitPosition) fail(at_span(index) + "a split master ends at position 2^32");
  }
  if (span.param_to % static_cast<uint64_t>(master) != 0 || span.low_to % 2 != 0 ||
      span.exp_avg_to % static_cast<uint64_t>(state) != 0 ||
      span.exp_avg_sq_to % static_cast<uint64_t>(state) != 0) {
    fail(at_span(index) + "a destination address is not a multiple of its element size");
  }
}

void check_hyper(const Hyper& h, AdamOp op) {
  if (h.step < 1) fail("step counts from 1, got " + std::to_string(h.step));
  if (!(h.beta1 >= 0.0 && h.beta1 < 1.0 && h.beta2 >= 0.0 && h.beta2 < 1.0)) {
    fail("betas must be in [0, 1), got " + std::to_string(h.beta1) + " and " +
         std::to_string(h.beta2));
  }
  if (!(h.eps >= 0.0)) fail("eps must not be negative, got " + std::to_string(h.eps));
  const bool decoupled = h.flags & kDecoupled;
  if (op != kStep && !decoupled && h.weight_decay != 0.0) {
    fail(
        "L2 weight decay depends on the parameter before the step, so a step with it can neither "
        "be rescaled nor rolled back; step again from the state before it");
  }
  if (op == kRollback) {
    if (h.beta1 == 0.0 || h.beta2 == 0.0) {
      fail("a step with a zero beta has forgotten the state before it and cannot be rolled back");
    }
    if (decoupled && h.lr * h.weight_decay == 1.0) {
      fail("lr * weight_decay is 1: the step has forgotten the parameter before it");
    }
  }
}

AdamConstants make_constants(const Hyper& h, const AdamCall& call) {
  const bool decoupled = h.flags & kDecoupled, corrects = h.flags & kBiasCorrection;
  const double sign = h.flags & kMaximize ? -1.0 : 1.0;
  const double step = static_cast<double>(h.step);
  const double correction1 = corrects ? 1.0 - std::pow(h.beta1, step) : 1.0;
  const double correction2 = corrects ? 1.0 - std::pow(h.beta2, step) : 1.0;
  const double decay = decoupled ? 1.0 - h.lr * h.weight_decay : 1.0;
  AdamConstants c{};
  c.scale = static_cast<float>(sign * call.scale);
  c.new_scale = static_cast<float>(sign * call.new_scale);
  c.b1 = static_cast<float>(h.beta1);
  c.c1 = static_cast<float>(1.0 - h.beta1);
  c.b2 = static_cast<float>(h.beta2);
  c.c2 = static_cast<float>(1.0 - h.beta2);
  c.decay = static_cast<float>(decay);
  c.l2 = static_cast<float>(h.weight_decay);
  c.use_l2 = !decoupled && h.weight_decay != 0.0;
  c.step_size = static_cast<float>(h.lr / correction1);
  c.r2 = static_cast<float>(1.0 / std::sqrt(correction2));
  c.eps = static_cast<float>(h.eps);
  c.inv_b1 = static_cast<float>(1.0 / static_cast<double>(c.b1));
  c.inv_b2 = static_cast<float>(1.0 / static_cast<double>(c.b2));
  c.inv_decay = static_cast<float>(1.0 / static_cast<double>(c.decay));
  c.out = call.form.out;
  c.stochastic = call.form.stochastic;
  return c;
}

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t noise_key(uint64_t seed, int64_t step, uint64_t position) {
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t keyed = mix(seed + golden) + static_cast<uint64_t>(step) * golden;
  return mix(mix(keyed) + (position >> 32) * golden);
}

AdamPiece make_piece(const Span& s, const AdamForm& form, int64_t first, int64_t numel) {
  const auto at = [first](uint64_t address, int bytes) {
    return address == 0 ? 0 : address + static_cast<uint64_t>(first * bytes);
  };
  const int master = master_bytes(form.master), state = element_bytes(form.state);
  const bool split = form.master == kMasterSplit;
  AdamPiece p{};
  p.param = pointer(at(s.param, master));
  p.grad = pointer(at(s.grad, element_bytes(form.grad)));
  p.exp_avg = pointer(at(s.exp_avg, state));
  p.exp_avg_sq = pointer(at(s.exp_avg_sq, state));
  p.param_to = mutable_pointer(at(s.param_to ? s.param_to : s.param, master));
  p.exp_avg_to = mutable_pointer(at(s.exp_avg_to ? s.exp_avg_to : s.exp_avg, state));
  p.exp_avg_sq_to = mutable_pointer(at(s.exp_avg_sq_to ? s.exp_avg_sq_to : s.exp_avg_sq, state));
  p.low = split ? pointer(at(s.low, 2)) : nullptr;
  p.low_to = split ? mutable_pointer(at(s.low_to ? s.low_to : s.low, 2)) : nullptr;
  p.out = form.out == kOutNone ? nullptr : mutable_pointer(at(s.out, 2));
  p.numel = numel;
  p.position = static_cast<uint64_t>(s.position) + static_cast<uint64_t>(first);
  return p;
}

// The ties among the spans' elements.
TieList ties_within(const Span* spans, int64_t num_spans, const uint32_t* ties, int64_t num_ties) {
  TieList found;
  for (int64_t i = 0; i < num_spans; i++) {
    const int64_t end = spans[i].position + spans[i].numel;
    const auto before = [](uint32_t tie, int64_t position) { return tie < position; };
    const uint32_t* const first =
        std::lower_bound(ties, ties + num_ties, spans[i].position, before);
    found.insert(found.end(), first, std::lower_bound(first, ties + num_ties, end, before));
  }
  std::sort(found.begin(), found.end());
  return found;
}

// What a rescale between equal scales does: results that go to other memory are copied there.
void keep_spans(const AdamCall& call, const Span* spans, int64_t num_spans) {
  const AdamForm& form = call.form;
  const int state = element_bytes(form.state);
  std::vector<Run> copies, outs;
  for (int64_t i = 0; i < num_spans; i++) {
    const Span& s = spans[i];
    if (s.numel == 0) continue;
    const auto move = [&](uint64_t from, uint64_t to, int bytes) {
      if (to != 0 && to != from) copies.push_back({from, to, s.numel * bytes});
    };
    move(s.param, s.param_to, master_bytes(form.master));
    move(s.exp_avg, s.exp_avg_to, state);
    move(s.exp_avg_sq, s.exp_avg_sq_to, state);
    if (form.master == kMasterSplit) move(s.low, s.low_to, 2);
    if (form.out != kOutNone) outs.push_back({s.param, s.out, s.numel});
  }
  copy_spans(copies.data(), static_cast<int64_t>(copies.size()), call.max_threads);
  if (form.out == kOutNone) return;
  const Dtype to = form.out == kOutBf16 ? kBf16 : kFp16;
  convert_spans(outs.data(), static_cast<int64_t>(outs.size()), kFp32, to, call.max_threads);
}

// Elements before the next cache line of the first moment: stores that cross lines cost bandwidth.
int64_t head_numel(const Span& s, const AdamForm& form, int64_t first) {
  const uint64_t bytes = static_cast<uint64_t>(element_bytes(form.state));
  const uint64_t base = s.exp_avg_to ? s.exp_avg_to : s.exp_avg;
  const uint64_t past = (base + static_cast<uint64_t>(first) * bytes) % kLineBytes;
  return past == 0 ? 0 : static_cast<int64_t>((kLineBytes - past) / bytes);
}

}  // namespace

AdamForm decode_form(int code, AdamOp op) {
  AdamForm form{};
  form.master = static_cast<Master>(code & 3);
  form.state = static_cast<Dtype>((code >> 2) & 3);
  form.grad = static_cast<Dtype>((code >> 4) & 3);
  form.out = static_cast<Out>((code >> 6) & 3);
  form.stochastic = (code >> 8) & 1;
  const bool in_table = code >= 0 && code < 512 && form.state < kNumDtypes &&
                        form.grad < kNumDtypes && form.out <= kOutFp16;
  const bool sensible = (form.out == kOutNone || form.master == kMasterFp32) &&
                        (!form.stochastic || form.master == kMasterBf16);
  if (!in_table || !sensible ||
      current_level().table.adam[op][form.master][form.state][form.grad] == nullptr) {
    fail("form " + std::to_string(code) + " has no kernel; make forms with adam_form()");
  }
  return form;
}

TieList adam_spans(const AdamCall& call, const Span* spans, int64_t num_spans, const Hyper* hypers,
                   int64_t num_hypers, const uint32_t* ties, int64_t num_ties) {
  const FloatEnvironment environment;  // a tiny eps must not be flushed while it is rounded
  std::vector<AdamConstants> constants;
  for (int64_t i = 0; i < num_hypers; i++) {
    check_hyper(hypers[i], call.op);
    constants.push_back(make_constants(hypers[i], call));
  }
  for (int64_t i = 0; i < num_spans; i++) check_span(spans[i], call.form, i, num_hypers);
  if (call.op == kRescale && static_cast<float>(call.scale) == static_cast<float>(call.new_scale)) {
    keep_spans(call, spans, num_spans);  // leaves every bit
    return ties_within(spans, num_spans, ties, num_ties);
  }
  int64_t total_numel = 0;
  for (int64_t i = 0; i < num_spans; i++) total_numel += spans[i].numel;
  for (AdamConstants& c : constants) c.streams = total_numel >= kStreamNumel;
  const AdamForm& form = call.form;
  const AdamFn run = current_level().table.adam[call.op][form.master][form.state][form.grad];
  TieCollector collector(ties, num_ties, kTileNumel);

  const auto run_piece = [&](const Span& span, int64_t first, int64_t numel) {
    AdamPiece piece = make_piece(span, form, first, numel);
    const AdamConstants& c = constants[static_cast<size_t>(span.hyper)];
    if (form.stochastic)
      piece.noise_key = noise_key(call.seed, hypers[span.hyper].step, piece.position);
    if (form.master != kMasterSplit) {
      Ties none{nullptr, 0, nullptr, 0};
      run(piece, c, none);
    } else {
      collector.collect([&](Ties& found) { run(piece, c, found); });
    }
  };
  const Tiles tiles(spans, num_spans, kTileNumel);
  for_each_item(tiles.num_tiles(), call.max_threads, [&](int64_t tile, int) {
    tiles.visit(tile, [&](int64_t index, int64_t first, int64_t numel) {
      const Span& span = spans[index];
      int64_t part = head_numel(span, form, first);
      if (part == 0) part = numel;
      while (numel > 0) {  // the noise key changes every 2^32 positions
        const uint64_t position = static_cast<uint64_t>(span.position + first);
        const uint64_t until_key = (uint64_t{1} << 32) - (position & 0xffffffffu);
        part = std::min({part, numel, static_cast<int64_t>(until_key)});
        run_piece(span, first, part);
        first += part;
        numel -= part;
        part = numel;
      }
    });
  });
  return collector.sorted();
}

}  // namespace swapio
