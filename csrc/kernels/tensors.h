// SPDX-License-Identifier: Apache-2.0
// Addresses of many torch tensors in one pass, without torch's headers.
#ifndef SWAPIO_KERNELS_TENSORS_H_
#define SWAPIO_KERNELS_TENSORS_H_

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <vector>

namespace swapio {

struct DlpackTable;

using AddressArray = pybind11::array_t<uint64_t, pybind11::array::c_style>;

// The layouts (dtype, device, shape, strides) of a growing list of tensors, to which the same
// tensors and their gradients are held later. Knows exact instances of `types` only: what a
// subclass calls its memory is the subclass's affair.
class TensorLayouts {
 public:
  // `exchange` is torch.Tensor.__dlpack_c_exchange_api__.
  TensorLayouts(const pybind11::capsule& exchange, const pybind11::tuple& types);

  // Appends layouts; false, with nothing appended, if one cannot be told.
  bool extend(const pybind11::list& tensors);
  void truncate(size_t count);
  size_t size() const { return kind_of_.size(); }

  // Writes the address of each tensor; returns the index of the first one whose layout is no
  // longer what was appended, -1 when there is none.
  pybind11::ssize_t addresses(const pybind11::list& tensors, AddressArray out) const;

  // Writes the address of each tensor's `grad`, 0 where that is None. Returns (dtype code, number
  // of gradients), or None if they are not all of one dtype with a kernel, laid out as their
  // tensors, on the same device and in memory as they are: then somebody has to look closer.
  pybind11::object grad_addresses(const pybind11::list& tensors, AddressArray out) const;

 private:
  using Layout = std::vector<int64_t>;
  struct Seen;

  bool look(PyObject* tensor, Seen& seen) const;

  const DlpackTable* table_;
  std::vector<pybind11::object> types_;
  std::map<Layout, uint32_t> kind_by_layout_;
  std::vector<Layout> kinds_;
  std::vector<uint32_t> kind_of_;
};

}  // namespace swapio

#endif  // SWAPIO_KERNELS_TENSORS_H_
