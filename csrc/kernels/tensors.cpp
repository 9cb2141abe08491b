// SPDX-License-Identifier: Apache-2.0
// Facts about DLPack's exchange table (version 1.2 and later): it is a versioned C ABI that torch
// puts behind a capsule; `dltensor_from_py_object_no_sync` describes a tensor without taking a
// reference, in some ten nanoseconds, where the properties in Python take a microsecond. The
// description's arrays belong to the tensor.
// Consequence: nothing of a description is kept beyond the tensor's turn.
//
// A description does not say that a tensor has the negative bit (the imaginary part of a conjugate,
// which torch makes without a copy). Autograd leaves it on gradients of one element only: any other
// such view skips every second number, so its strides are not a parameter's.
#include "tensors.h"

#include <algorithm>

#include "types.h"

namespace py = pybind11;

namespace swapio {

namespace {

// The names and the order of fields are DLPack's, and part of its ABI.
struct DlDevice {
  int32_t device_type, device_id;
};

struct DlDataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

constexpr uint32_t kDlpackMajor = 1;
constexpr uint8_t kDlFloat = 2, kDlBfloat = 4;
constexpr uint64_t kNoMemory = 64;  // an aligned address that nobody reads from

int dtype_code(const DlDataType& dtype) {
  if (dtype.lanes != 1) return -1;
  if (dtype.code == kDlFloat && dtype.bits == 32) return kFp32;
  if (dtype.code == kDlFloat && dtype.bits == 16) return kFp16;
  if (dtype.code == kDlBfloat && dtype.bits == 16) return kBf16;
  return -1;
}

int64_t numel_of(const DlTensor& tensor) {
  int64_t numel = 1;
  for (int32_t i = 0; i < tensor.ndim; i++) numel *= tensor.shape[i];
  return numel;
}

// Whether a tensor has elements but no memory: somebody freed its storage.
bool is_freed(const DlTensor& tensor) { return tensor.data == nullptr && numel_of(tensor) > 0; }

bool has_negative_bit(const py::object& tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const auto found =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), name));
  if (!found) throw py::error_already_set();
  return found.ptr() == Py_True;
}

uint64_t address_of(const DlTensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
}

}  // namespace

struct DlpackTable {
  uint32_t major, minor;
  DlpackTable* older;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, DlTensor* out);
  void* current_work_stream;
};

struct TensorLayouts::Seen : DlTensor {};

TensorLayouts::TensorLayouts(const py::capsule& exchange, const py::tuple& types)
    : table_(nullptr) {
  auto* table =
      static_cast<DlpackTable*>(PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) throw py::error_already_set();
  while (table != nullptr && table->major != kDlpackMajor) table = table->older;
  if (table == nullptr || table->dltensor_from_py_object_no_sync == nullptr) {
    throw py::value_error("the exchange table is of another major version of DLPack than 1");
  }
  table_ = table;
  for (const auto& type : types) types_.push_back(py::reinterpret_borrow<py::object>(type));
}

bool TensorLayouts::look(PyObject* tensor, Seen& seen) const {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  const bool known = std::any_of(types_.begin(), types_.end(),
                                 [type](const py::object& one) { return one.ptr() == type; });
  if (!known) return false;
  if (table_->dltensor_from_py_object_no_sync(tensor, &seen) != 0) {
    PyErr_Clear();  // not strided, say: the caller looks at it closely and says so
    return false;
  }
  return seen.ndim == 0 || (seen.shape != nullptr && seen.strides != nullptr);
}

bool TensorLayouts::extend(const py::list& tensors) {
  std::vector<Layout> layouts;
  for (const auto& tensor : tensors) {
    Seen seen;
    if (!look(tensor.ptr(), seen)) return false;
    Layout layout{seen.dtype.code, seen.dtype.bits, seen.dtype.lanes, seen.device.device_type,
                  seen.device.device_id};
    layout.insert(layout.end(), seen.shape, seen.shape + seen.ndim);
    layout.insert(layout.end(), seen.strides, seen.strides + seen.ndim);
    layouts.push_back(std::move(layout));
  }
  for (const Layout& layout : layouts) {
    const auto found =
        kind_by_layout_.try_emplace(layout, static_cast<uint32_t>(kinds_.size())).first;
    if (found->second == kinds_.size()) kinds_.push_back(layout);
    kind_of_.push_back(found->second);
  }
  return true;
}

void TensorLayouts::truncate(size_t count) {
  if (count < kind_of_.size()) kind_of_.resize(count);
}

namespace {

constexpr size_t kHeader = 5;  // code, bits, lanes, device type, device id

// Whether shape and device are those of `layout`, and the elements lie in the same order.
bool lies_as(const DlTensor& tensor, const std::vector<int64_t>& layout) {
  const auto ndim = static_cast<size_t>(tensor.ndim);
  if (layout.size() != kHeader + 2 * ndim) return false;
  if (tensor.device.device_type != layout[3] || tensor.device.device_id != layout[4]) return false;
  const int64_t* const shape = layout.data() + kHeader;
  for (size_t i = 0; i < ndim; i++) {
    if (tensor.shape[i] != shape[i]) return false;
  }
  if (numel_of(tensor) == 0) return true;
  for (size_t i = 0; i < ndim; i++) {
    if (shape[i] != 1 && tensor.strides[i] != shape[ndim + i]) return false;
  }
  return true;
}

bool has_dtype_of(const DlTensor& tensor, const std::vector<int64_t>& layout) {
  return tensor.dtype.code == layout[0] && tensor.dtype.bits == layout[1] &&
         tensor.dtype.lanes == layout[2];
}

}  // namespace

py::ssize_t TensorLayouts::addresses(const py::list& tensors, AddressArray out) const {
  if (tensors.size() != size() || out.ndim() != 1 || out.size() != py::ssize_t(size())) {
    throw py::value_error("tensors and out must be as long as the layouts");
  }
  uint64_t* const to = out.mutable_data();
  py::ssize_t first = -1;
  for (size_t i = 0; i < size(); i++) {
    Seen seen;
    PyObject* const tensor = PyList_GET_ITEM(tensors.ptr(), py::ssize_t(i));
    const Layout& layout = kinds_[kind_of_[i]];
    const bool fits = look(tensor, seen) && has_dtype_of(seen, layout) && lies_as(seen, layout) &&
                      !is_freed(seen);
    if (!fits && first < 0) first = py::ssize_t(i);
    to[i] = fits ? address_of(seen) : 0;
  }
  return first;
}

py::object TensorLayouts::grad_addresses(const py::list& tensors, AddressArray out) const {
  if (tensors.size() != size() || out.ndim() != 1 || out.size() != py::ssize_t(size())) {
    throw py::value_error("tensors and out must be as long as the layouts");
  }
  static PyObject* const name = PyUnicode_InternFromString("grad");
  uint64_t* const to = out.mutable_data();
  int dtype = -1;
  py::ssize_t count = 0;
  for (size_t i = 0; i < size(); i++) {
    PyObject* const tensor = PyList_GET_ITEM(tensors.ptr(), py::ssize_t(i));
    const auto grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor, name));
    if (!grad) throw py::error_already_set();
    to[i] = 0;
    if (grad.is_none()) continue;
    Seen seen;
    if (!look(grad.ptr(), seen) || !lies_as(seen, kinds_[kind_of_[i]])) return py::none();
    if (is_freed(seen) || (numel_of(seen) == 1 && has_negative_bit(grad))) return py::none();
    const int code = dtype_code(seen.dtype);
    if (code < 0 || (count > 0 && code != dtype)) return py::none();
    dtype = code;
    count++;
    // Without elements it may have no memory either, but it is there.
    to[i] = std::max(address_of(seen), kNoMemory);
  }
  return py::make_tuple(dtype, count);
}

}  // namespace swapio
