// SPDX-License-Identifier: Apache-2.0
// The body of every ISA object: define SWAPIO_ISA, include the simd header, then this.
#ifndef SWAPIO_PREFETCH_NUMEL
#define SWAPIO_PREFETCH_NUMEL 512
#endif

// Each needs the one before.
// clang-format off
#include "memory-inl.h"
#include "adam-inl.h"
#include "elementwise-inl.h"
// clang-format on

namespace swapio {
namespace SWAPIO_ISA {

void fill_table(KernelTable& table) {
  fill_adam(table);
  fill_elementwise(table);
}

}  // namespace SWAPIO_ISA
}  // namespace swapio
