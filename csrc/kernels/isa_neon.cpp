// SPDX-License-Identifier: Apache-2.0
#include "types.h"

#define SWAPIO_ISA neon
#include "simd_neon-inl.h"
#include "table-inl.h"
