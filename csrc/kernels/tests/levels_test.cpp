// SPDX-License-Identifier: Apache-2.0
// Every level against the scalar one, bit for bit, without Python: so that it also runs under the
// sanitizers with leak checking, and under emulation for processors that are not at hand.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../dispatch.h"
#include "../pool.h"
#include "../spans.h"

namespace {

using swapio::AdamCall;
using swapio::AdamOp;
using swapio::Hyper;
using swapio::Span;
using swapio::TieList;

int g_failures = 0;

void check(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAILED: %s\n", what.c_str());
  g_failures++;
}

// xorshift64*: the same values on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1Du) >> 32);
  }

 private:
  uint64_t state_;
};

// fp32 bits of about 2^exponent, every 13th an odd value (nan, infinities, subnormals, zeros).
uint32_t value_bits(Random& random, uint32_t exponent, bool is_positive) {
  static const uint32_t odd[] = {0x7fc01234, 0x7f800000, 0xff800000, 0x00000001, 0x80012345,
                                 0x80000000, 0x7f7fffff, 0xff7f8000, 0x00800000, 0x3f808000};
  const uint32_t bits = random.next();
  if (bits % 13 == 0) return odd[random.next() % 10] & (is_positive ? 0x7fffffffu : 0xffffffffu);
  const uint32_t sign = is_positive ? 0 : bits & 0x80000000u;
  return sign | ((exponent + bits % 4) << 23) | (random.next() & 0x7fffffu);
}

constexpr int64_t kNumel = 2 * 32768 + 1007;
constexpr int64_t kOffset = 3;  // elements: nothing is aligned to a cache line

struct Arrays {
  // uint32_t holds fp32 and, in its first half, any 16-bit dtype.
  std::vector<uint32_t> param, grad, exp_avg, exp_avg_sq;
  std::vector<uint16_t> low, out;

  Arrays() : low(kNumel + kOffset), out(kNumel + kOffset) {
    Random random(7);
    for (int64_t i = 0; i < kNumel + kOffset; i++) {
      param.push_back(value_bits(random, 122, false));
      grad.push_back(value_bits(random, 118, false));
      exp_avg.push_back(value_bits(random, 118, false));
      exp_avg_sq.push_back(value_bits(random, 110, true));
      low[static_cast<size_t>(i)] = static_cast<uint16_t>(random.next());
      if (random.next() % 5 == 0) low[static_cast<size_t>(i)] = 0x8000;
    }
  }

  bool operator==(const Arrays& other) const {
    return param == other.param && grad == other.grad && exp_avg == other.exp_avg &&
           exp_avg_sq == other.exp_avg_sq && low == other.low && out == other.out;
  }
};

template <class T>
uint64_t address(std::vector<T>& array, uint64_t element_bytes) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(array.data())) + kOffset * element_bytes;
}

Span make_span(Arrays& arrays, int form) {
  const uint64_t param = (form & 3) == swapio::kMasterFp32 ? 4 : 2;
  const uint64_t state = ((form >> 2) & 3) == swapio::kFp32 ? 4 : 2;
  const uint64_t grad = ((form >> 4) & 3) == swapio::kFp32 ? 4 : 2;
  Span span{};
  span.param = address(arrays.param, param);
  span.grad = address(arrays.grad, grad);
  span.exp_avg = address(arrays.exp_avg, state);
  span.exp_avg_sq = address(arrays.exp_avg_sq, state);
  span.low = address(arrays.low, 2);
  span.out = address(arrays.out, 2);
  span.numel = kNumel;
  span.position = 12345;
  return span;
}

bool has_kernel(int form, AdamOp op) {
  try {
    swapio::decode_form(form, op);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

TieList run(Arrays& arrays, int form, AdamOp op, const TieList& ties) {
  AdamCall call;
  call.op = op;
  call.form = swapio::decode_form(form, op);
  call.scale = 0.7;
  call.new_scale = 0.01;
  call.seed = 5;
  const Span span = make_span(arrays, form);
  const Hyper hyper{1e-3, 0.9, 0.999, 1e-8, 1e-2, 7, swapio::kDecoupled | swapio::kBiasCorrection,
                    0};
  return swapio::adam_spans(call, &span, 1, &hyper, 1, ties.data(),
                            static_cast<int64_t>(ties.size()));
}

int compare_adam(const std::string& level) {
  TieList ties;
  for (uint32_t position = 12345; position < 12345 + kNumel; position += 3) {
    ties.push_back(position);
  }
  int num_compared = 0;
  for (int form = 0; form < 512; form++) {
    for (const AdamOp op : {swapio::kStep, swapio::kRescale, swapio::kRollback}) {
      if (!has_kernel(form, op)) continue;
      Arrays expected, got;
      swapio::select_level("scalar");
      const TieList expected_ties = run(expected, form, op, ties);
      swapio::select_level(level);
      const TieList got_ties = run(got, form, op, ties);
      check(got == expected && got_ties == expected_ties,
            level + ": form " + std::to_string(form) + ", op " + std::to_string(op));
      num_compared++;
    }
  }
  return num_compared;
}

void compare_data(const std::string& level) {
  for (int from = 0; from < swapio::kNumDtypes; from++) {
    const swapio::Dtype dtype = static_cast<swapio::Dtype>(from);
    double sums[2];
    Arrays finite;
    for (uint32_t& bits : finite.grad) bits &= 0x3f7f3f7f;  // as fp32 and as halves, finite
    for (int to = 0; to < swapio::kNumDtypes; to++) {
      std::vector<uint32_t> results[2];
      for (const int which : {0, 1}) {
        swapio::select_level(which == 0 ? "scalar" : level);
        Arrays source;
        results[which].resize(kNumel + kOffset);
        const swapio::Run run{address(source.grad, 4), address(results[which], 4), kNumel};
        if (from != to) swapio::convert_spans(&run, 1, dtype, static_cast<swapio::Dtype>(to), 0);
        const swapio::Run whole{address(finite.grad, 4), 0, kNumel};
        sums[which] = swapio::square_sums(&whole, 1, dtype, 0)[0];
      }
      check(results[0] == results[1],
            level + ": conversion " + std::to_string(from) + " to " + std::to_string(to));
      check(std::memcmp(&sums[0], &sums[1], sizeof sums[0]) == 0,
            level + ": square sum of dtype " + std::to_string(from));
    }
  }
}

void compare_split(const std::string& level) {
  Arrays expected, got;
  TieList ties[2];
  for (const int which : {0, 1}) {
    swapio::select_level(which == 0 ? "scalar" : level);
    Arrays& a = which == 0 ? expected : got;
    const swapio::SplitRun run{address(a.param, 4), address(a.out, 2), address(a.low, 2), kNumel,
                               5};
    ties[which] = swapio::split_spans(&run, 1, 0);
    swapio::join_spans(&run, 1, ties[which].data(), static_cast<int64_t>(ties[which].size()), 0);
  }
  check(expected == got && ties[0] == ties[1], level + ": split and join");
}

// Callers at once, with the pool replaced under them: for the thread sanitizer.
void share_the_pool() {
  Arrays expected;
  run(expected, 0, swapio::kStep, {});
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; i++) {
    callers.emplace_back([&expected] {
      for (int round = 0; round < 5; round++) {
        Arrays mine;
        run(mine, 0, swapio::kStep, {});
        if (!(mine == expected)) std::abort();
      }
    });
  }
  for (int i = 0; i < 20; i++) swapio::set_threads(2 + i % 3, {});
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main() {
  swapio::set_threads(3, {});
  for (const std::string& level : swapio::supported_levels()) {
    const int num_compared = compare_adam(level);
    compare_data(level);
    compare_split(level);
    std::printf("%s: %d kernels compared\n", level.c_str(), num_compared);
  }
  share_the_pool();
  swapio::stop_threads();
  std::printf(g_failures == 0 ? "ok\n" : "%d failures\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
