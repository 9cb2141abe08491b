// SPDX-License-Identifier: Apache-2.0
// Which instruction set runs, chosen once by CPUID and what the operating system saves (XCR0).
#ifndef SWAPIO_KERNELS_DISPATCH_H_
#define SWAPIO_KERNELS_DISPATCH_H_

#include <string>
#include <vector>

#include "types.h"

namespace swapio {

using HashFn = uint64_t (*)(const void* data, size_t nbytes);

struct Level {
  const char* name;
  KernelTable table;
  HashFn hash;  // null when the module was built without xxhash.h
};

// The level in use. The first call reads SWAPIO_SIMD; throws std::invalid_argument when that names
// a level this machine or build does not have.
const Level& current_level();
void select_level(const std::string& name);
// Names of the levels that run here, slowest first.
std::vector<std::string> supported_levels();

}  // namespace swapio

#endif  // SWAPIO_KERNELS_DISPATCH_H_
