// SPDX-License-Identifier: Apache-2.0
// swapio._kernels: numpy arrays of spans in, GIL released around the work. dtypes of tensors,
// contiguity and overlap are checked in optim/kernels.py; here only what keeps the call memory-safe
// given true addresses.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu.h"
#include "dispatch.h"
#include "pool.h"
#include "spans.h"
#include "symmetric.h"
#include "tensors.h"

namespace py = pybind11;

namespace swapio {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;
using SpanArray = py::array_t<Span, py::array::c_style>;
using HyperArray = py::array_t<Hyper, py::array::c_style>;
using Threads = std::optional<int64_t>;
using OptionalTies = std::optional<Array<uint32_t>>;

// Takes the GIL again. At interpreter exit CPython (before 3.14) ends a daemon thread that comes
// back for it with pthread_exit, which unwinds the frames of C++ above: their destructors would
// touch Python objects without the GIL. Such a thread sleeps instead until the process is gone: the
// call throws nothing else, and a handler that never ends is a legal end of an unwinding.
void restore_thread(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    for (;;) pause();
  }
}

template <class Work>
void without_gil(const Work& work) {
  PyThreadState* const state = PyEval_SaveThread();
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  restore_thread(state);
  if (error) std::rethrow_exception(error);
}

int thread_limit(const Threads& threads) {
  if (!threads) return 0;
  if (*threads < 1) throw py::value_error("threads must be at least 1");
  return static_cast<int>(std::min<int64_t>(*threads, kMaxThreads));
}

Dtype to_dtype(int code) {
  if (code < 0 || code >= kNumDtypes) throw py::value_error("dtype codes are 0, 1 and 2");
  return static_cast<Dtype>(code);
}

py::array_t<uint32_t> to_array(const TieList& ties) {
  return py::array_t<uint32_t>(static_cast<py::ssize_t>(ties.size()), ties.data());
}

template <class T>
void check_one_dimensional(const T& array, const char* name) {
  if (array.ndim() != 1) throw py::value_error(std::string(name) + " must have one dimension");
}

struct TieView {
  const uint32_t* data = nullptr;
  int64_t size = 0;
  explicit TieView(const OptionalTies& ties) {
    if (!ties) return;
    check_one_dimensional(*ties, "ties");
    data = ties->data();
    size = ties->size();
    for (int64_t i = 1; i < size; i++) {
      if (data[i - 1] >= data[i]) throw py::value_error("ties must be strictly increasing");
    }
  }
};

py::object run_adam(AdamCall call, int form, const SpanArray& spans, const HyperArray& hypers,
                    const OptionalTies& ties) {
  check_one_dimensional(spans, "spans");
  check_one_dimensional(hypers, "hypers");
  call.form = decode_form(form, call.op);
  const TieView view(ties);
  TieList found;
  without_gil([&] {
    found = adam_spans(call, spans.data(), spans.size(), hypers.data(), hypers.size(), view.data,
                       view.size);
  });
  if (call.form.master != kMasterSplit) return py::none();
  return to_array(found);
}

py::object adam_step_spans(int form, const SpanArray& spans, const HyperArray& hypers,
                           double grad_scale, const OptionalTies& ties, uint64_t seed,
                           const Threads& threads) {
  AdamCall call;
  call.op = kStep;
  call.scale = grad_scale;
  call.seed = seed;
  call.max_threads = thread_limit(threads);
  return run_adam(call, form, spans, hypers, ties);
}

py::object adam_rescale_spans(int form, const SpanArray& spans, const HyperArray& hypers,
                              double old_scale, double new_scale, const OptionalTies& ties,
                              const Threads& threads) {
  AdamCall call;
  call.op = kRescale;
  call.scale = old_scale;
  call.new_scale = new_scale;
  call.max_threads = thread_limit(threads);
  return run_adam(call, form, spans, hypers, ties);
}

py::object adam_rollback_spans(int form, const SpanArray& spans, const HyperArray& hypers,
                               double grad_scale, const OptionalTies& ties,
                               const Threads& threads) {
  AdamCall call;
  call.op = kRollback;
  call.scale = grad_scale;
  call.max_threads = thread_limit(threads);
  return run_adam(call, form, spans, hypers, ties);
}

// `to` may be null: functions that only read.
std::vector<Run> make_runs(const Array<uint64_t>& from, const Array<uint64_t>* to,
                           const Array<int64_t>& numels, uint64_t from_bytes, uint64_t to_bytes) {
  check_one_dimensional(from, "addresses");
  check_one_dimensional(numels, "numels");
  if (from.size() != numels.size() || (to != nullptr && to->size() != numels.size())) {
    throw py::value_error("addresses and numels differ in length");
  }
  std::vector<Run> runs;
  for (py::ssize_t i = 0; i < numels.size(); i++) {
    const Run run{from.data()[i], to == nullptr ? 0 : to->data()[i], numels.data()[i]};
    if (run.numel < 0) throw py::value_error("numels must not be negative");
    const bool null = run.from == 0 || (to != nullptr && run.to == 0);
    if (run.numel > 0 && null) throw py::value_error("an address is null");
    if (run.from % from_bytes != 0 || run.to % to_bytes != 0) {
      throw py::value_error("an address is not a multiple of its element size");
    }
    runs.push_back(run);
  }
  return runs;
}

uint64_t element_bytes(Dtype dtype) { return dtype == kFp32 ? 4 : 2; }

py::tuple grad_stats_spans(const Array<uint64_t>& addresses, const Array<int64_t>& numels,
                           int dtype, const Threads& threads) {
  const Dtype type = to_dtype(dtype);
  const auto runs = make_runs(addresses, nullptr, numels, element_bytes(type), 1);
  const int limit = thread_limit(threads);
  double total = 0.0;
  without_gil([&] {
    const FloatEnvironment environment;  // the sum is not to depend on the caller's rounding
    for (const double sum :
         square_sums(runs.data(), static_cast<int64_t>(runs.size()), type, limit))
      total += sum;
  });
  return py::make_tuple(total, std::isfinite(total));
}

py::array_t<double> square_sum_spans(const Array<uint64_t>& addresses, const Array<int64_t>& numels,
                                     int dtype, const Threads& threads) {
  const Dtype type = to_dtype(dtype);
  const auto runs = make_runs(addresses, nullptr, numels, element_bytes(type), 1);
  const int limit = thread_limit(threads);
  std::vector<double> sums;
  without_gil(
      [&] { sums = square_sums(runs.data(), static_cast<int64_t>(runs.size()), type, limit); });
  return py::array_t<double>(static_cast<py::ssize_t>(sums.size()), sums.data());
}

py::array_t<uint64_t> hash_runs(const std::vector<Run>& runs, const Threads& threads) {
  const int limit = thread_limit(threads);
  py::array_t<uint64_t> hashes(static_cast<py::ssize_t>(runs.size()));
  uint64_t* const out = hashes.mutable_data();
  bool done = false;
  without_gil(
      [&] { done = hash_spans(runs.data(), static_cast<int64_t>(runs.size()), out, limit); });
  if (!done) {
    throw std::runtime_error(
        "this build has no xxh3 (has_xxh3 is False): libxxhash-dev was not found when it was made; "
        "use the xxhash wheel");
  }
  return hashes;
}

py::array_t<uint64_t> hash_spans_(const Array<uint64_t>& addresses, const Array<int64_t>& nbytes,
                                  const Threads& threads) {
  return hash_runs(make_runs(addresses, nullptr, nbytes, 1, 1), threads);
}

py::array_t<uint64_t> hash_blocks(const std::vector<std::pair<uint64_t, int64_t>>& ranges,
                                  int64_t block_bytes, const Threads& threads) {
  if (block_bytes < 1) throw py::value_error("block_bytes must be at least 1");
  std::vector<Run> runs;
  for (const auto& [address, nbytes] : ranges) {
    if (nbytes < 0) throw py::value_error("a length is negative");
    if (nbytes > 0 && address == 0) throw py::value_error("an address is null");
    for (int64_t at = 0; at < nbytes; at += block_bytes) {
      runs.push_back({address + static_cast<uint64_t>(at), 0, std::min(block_bytes, nbytes - at)});
    }
  }
  return hash_runs(runs, threads);
}

void convert_spans_(const Array<uint64_t>& src, const Array<uint64_t>& dst,
                    const Array<int64_t>& numels, int src_dtype, int dst_dtype,
                    const Threads& threads) {
  const Dtype from = to_dtype(src_dtype), to = to_dtype(dst_dtype);
  const auto runs = make_runs(src, &dst, numels, element_bytes(from), element_bytes(to));
  const int limit = thread_limit(threads);
  without_gil(
      [&] { convert_spans(runs.data(), static_cast<int64_t>(runs.size()), from, to, limit); });
}

void copy_spans_(const Array<uint64_t>& src, const Array<uint64_t>& dst,
                 const Array<int64_t>& nbytes, const Threads& threads) {
  const auto runs = make_runs(src, &dst, nbytes, 1, 1);
  const int limit = thread_limit(threads);
  without_gil([&] { copy_spans(runs.data(), static_cast<int64_t>(runs.size()), limit); });
}

void fill_spans_(const Array<uint64_t>& dst, const Array<int64_t>& nbytes, int value,
                 const Threads& threads) {
  const auto runs = make_runs(dst, &dst, nbytes, 1, 1);
  if (value < 0 || value > 255) throw py::value_error("value is a byte");
  const int limit = thread_limit(threads);
  without_gil([&] { fill_spans(runs.data(), static_cast<int64_t>(runs.size()), value, limit); });
}

std::vector<SplitRun> make_split_runs(const Array<uint64_t>& master, const Array<uint64_t>& high,
                                      const Array<uint64_t>& low, const Array<int64_t>& numels,
                                      const Array<int64_t>& positions) {
  const auto outer = make_runs(master, &high, numels, 4, 2);
  const auto inner = make_runs(low, &low, numels, 2, 2);
  if (positions.size() != numels.size()) {
    throw py::value_error("positions and numels differ in length");
  }
  std::vector<SplitRun> runs;
  for (size_t i = 0; i < outer.size(); i++) {
    const int64_t position = positions.data()[i];
    if (position < 0 || position + outer[i].numel > (int64_t{1} << 32)) {
      throw py::value_error("positions of a split master lie in [0, 2^32)");
    }
    runs.push_back({outer[i].from, outer[i].to, inner[i].from, outer[i].numel, position});
  }
  return runs;
}

py::array_t<uint32_t> split_master_spans(const Array<uint64_t>& master, const Array<uint64_t>& high,
                                         const Array<uint64_t>& low, const Array<int64_t>& numels,
                                         const Array<int64_t>& positions, const Threads& threads) {
  const auto runs = make_split_runs(master, high, low, numels, positions);
  const int limit = thread_limit(threads);
  TieList found;
  without_gil([&] { found = split_spans(runs.data(), static_cast<int64_t>(runs.size()), limit); });
  return to_array(found);
}

void join_master_spans(const Array<uint64_t>& high, const Array<uint64_t>& low,
                       const Array<uint64_t>& master, const Array<int64_t>& numels,
                       const Array<int64_t>& positions, const OptionalTies& ties,
                       const Threads& threads) {
  const auto runs = make_split_runs(master, high, low, numels, positions);
  const int limit = thread_limit(threads);
  const TieView view(ties);
  without_gil([&] {
    join_spans(runs.data(), static_cast<int64_t>(runs.size()), view.data, view.size, limit);
  });
}

SymmetricOperand to_operand(uint64_t data, int64_t row_stride, int64_t depth_stride,
                            uint64_t packed, uint64_t tail, bool is_packed) {
  return {reinterpret_cast<const float*>(data),
          row_stride,
          depth_stride,
          reinterpret_cast<float*>(packed),
          reinterpret_cast<float*>(tail),
          is_packed};
}

using OperandTuple = std::tuple<uint64_t, int64_t, int64_t, uint64_t, uint64_t, bool>;

void symmetric_product_(const OperandTuple& left, const OperandTuple& right, uint64_t out,
                        int64_t out_stride, int64_t order, int64_t depth, uint64_t add,
                        int64_t add_stride, double beta, double alpha, const Threads& threads) {
  if (order < 0 || depth < 1)
    throw py::value_error("order must be at least 0 and depth at least 1");
  const SymmetricCall call{std::apply(to_operand, left),
                           std::apply(to_operand, right),
                           reinterpret_cast<float*>(out),
                           out_stride,
                           reinterpret_cast<const float*>(add),
                           add_stride,
                           static_cast<float>(alpha),
                           static_cast<float>(beta),
                           order,
                           depth};
  const int limit = thread_limit(threads);
  without_gil([&] { symmetric_product(call, limit); });
}

void set_threads_(int64_t num_threads_wanted, const std::vector<int>& cores) {
  if (num_threads_wanted < 1 || num_threads_wanted > kMaxThreads) {
    throw py::value_error("num_threads must be at least 1 and at most " +
                          std::to_string(kMaxThreads) + ", got " +
                          std::to_string(num_threads_wanted));
  }
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(getpid(), sizeof allowed, &allowed) != 0) CPU_ZERO(&allowed);
  for (const int core : cores) {
    if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(static_cast<size_t>(core), &allowed)) {
      throw py::value_error("core " + std::to_string(core) +
                            " is not in this process's affinity mask");
    }
  }
  without_gil([&] { set_threads(static_cast<int>(num_threads_wanted), cores); });
}

void stop_threads_() {
  without_gil([&] { stop_threads(); });
}

void define_adam(py::module_& m) {
  m.def("adam_step_spans", &adam_step_spans, py::arg("form"), py::arg("spans"), py::arg("hypers"),
        py::kw_only(), py::arg("grad_scale") = 1.0, py::arg("ties") = py::none(),
        py::arg("seed") = 0, py::arg("threads") = py::none(), "Step all spans in one pass.");
  m.def("adam_rescale_spans", &adam_rescale_spans, py::arg("form"), py::arg("spans"),
        py::arg("hypers"), py::kw_only(), py::arg("old_scale"), py::arg("new_scale"),
        py::arg("ties") = py::none(), py::arg("threads") = py::none(),
        "Turn the result of a step on old_scale * g into that of a step on new_scale * g.");
  m.def("adam_rollback_spans", &adam_rollback_spans, py::arg("form"), py::arg("spans"),
        py::arg("hypers"), py::kw_only(), py::arg("grad_scale") = 1.0, py::arg("ties") = py::none(),
        py::arg("threads") = py::none(), "Undo a step algebraically (not bit exact).");
}

void define_data(py::module_& m) {
  m.def("grad_stats_spans", &grad_stats_spans, py::arg("addresses"), py::arg("numels"),
        py::arg("dtype"), py::kw_only(), py::arg("threads") = py::none(),
        "Sum of squares in float64 and whether all values are finite.");
  m.def("square_sum_spans", &square_sum_spans, py::arg("addresses"), py::arg("numels"),
        py::arg("dtype"), py::kw_only(), py::arg("threads") = py::none(),
        "Sum of squares of each span, in float64.");
  m.def("hash_spans", &hash_spans_, py::arg("addresses"), py::arg("nbytes"), py::kw_only(),
        py::arg("threads") = py::none(), "xxh3-64 (seed 0) of each span.");
  m.def("hash_blocks", &hash_blocks, py::arg("ranges"), py::arg("block_bytes"), py::kw_only(),
        py::arg("threads") = py::none(),
        "xxh3-64 (seed 0) of each block of (address, nbytes) ranges; the last may be short.");
  m.def("convert_spans", &convert_spans_, py::arg("src"), py::arg("dst"), py::arg("numels"),
        py::arg("src_dtype"), py::arg("dst_dtype"), py::kw_only(), py::arg("threads") = py::none(),
        "Convert, rounding to nearest even as Tensor.to does.");
  m.def("copy_spans", &copy_spans_, py::arg("src"), py::arg("dst"), py::arg("nbytes"),
        py::kw_only(), py::arg("threads") = py::none(), "Copy bytes.");
  m.def("fill_spans", &fill_spans_, py::arg("dst"), py::arg("nbytes"), py::kw_only(),
        py::arg("value") = 0, py::arg("threads") = py::none(), "Fill with one byte.");
  m.def("split_master_spans", &split_master_spans, py::arg("master"), py::arg("high"),
        py::arg("low"), py::arg("numels"), py::arg("positions"), py::kw_only(),
        py::arg("threads") = py::none(), "Split fp32 into bf16 and int16; returns the ties.");
  m.def("join_master_spans", &join_master_spans, py::arg("high"), py::arg("low"), py::arg("master"),
        py::arg("numels"), py::arg("positions"), py::kw_only(), py::arg("ties") = py::none(),
        py::arg("threads") = py::none(), "Put fp32 masters together again.");
}

void define_products(py::module_& m) {
  m.attr("PACKED_GROUP") = kPackedGroup;
  m.def("symmetric_group_rows", &symmetric_group_rows,
        "Rows that symmetric_product packs together; 0 if the level in use has no such kernel.");
  m.def("symmetric_product", &symmetric_product_, py::arg("left"), py::arg("right"), py::arg("out"),
        py::arg("out_stride"), py::arg("order"), py::arg("depth"), py::kw_only(),
        py::arg("add") = 0, py::arg("add_stride") = 0, py::arg("beta") = 0.0,
        py::arg("alpha") = 1.0, py::arg("threads") = py::none(),
        "out = alpha left right^T + beta add, known to be symmetric, in fp32; operands are "
        "(address, row stride, depth stride, packed address, tail address, whether they are "
        "packed).");
}

void define_settings(py::module_& m) {
  m.def("simd_level", [] { return std::string(current_level().name); }, "The level in use.");
  m.def("simd_levels", &supported_levels, "The levels that run here, slowest first.");
  m.def("set_simd_level", &select_level, py::arg("name"), "Choose a level, or 'auto'.");
  m.def("set_threads", &set_threads_, py::arg("num_threads"), py::arg("cores") = std::vector<int>{},
        "Set the thread budget (1 to 4096) and the cores to bind to.");
  m.def("num_threads", &num_threads, "The thread budget, the caller included.");
  m.def("thread_cores", &thread_cores, "The cores that threads are bound to; empty if unbound.");
  m.def("default_num_threads", &default_num_threads, "Cores of this process per local rank.");
  m.def("stop_threads", &stop_threads_, "End idle threads; the next call starts them again.");
}

void define_tensors(py::module_& m) {
  py::class_<TensorLayouts>(m, "TensorLayouts",
                            "Layouts of tensors, and where they and their gradients are now.")
      .def(py::init<const py::capsule&, const py::tuple&>(), py::arg("exchange"), py::arg("types"))
      .def("__len__", &TensorLayouts::size)
      .def("extend", &TensorLayouts::extend, py::arg("tensors"))
      .def("truncate", &TensorLayouts::truncate, py::arg("count"))
      .def("addresses", &TensorLayouts::addresses, py::arg("tensors"), py::arg("out").noconvert())
      .def("grad_addresses", &TensorLayouts::grad_addresses, py::arg("tensors"),
           py::arg("out").noconvert());
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "CPU kernels over arrays of addresses. See swapio.optim.kernels for the typed face.";
  PYBIND11_NUMPY_DTYPE(Span, param, grad, exp_avg, exp_avg_sq, low, out, param_to, exp_avg_to,
                       exp_avg_sq_to, low_to, numel, position, hyper, reserved);
  PYBIND11_NUMPY_DTYPE(Hyper, lr, beta1, beta2, eps, weight_decay, step, flags, reserved);
  m.attr("SPAN_DTYPE") = py::dtype::of<Span>();
  m.attr("HYPER_DTYPE") = py::dtype::of<Hyper>();
  m.attr("has_xxh3") = SWAPIO_XXH3_FOUND != 0;
  m.attr("DECOUPLED") = static_cast<int>(kDecoupled);
  m.attr("BIAS_CORRECTION") = static_cast<int>(kBiasCorrection);
  m.attr("MAXIMIZE") = static_cast<int>(kMaximize);
  define_adam(m);
  define_data(m);
  define_products(m);
  define_settings(m);
  define_tensors(m);
  // Threads end before the interpreter does, so that no tool sees them die.
  py::module_::import("atexit").attr("register")(m.attr("stop_threads"));
}

}  // namespace swapio
