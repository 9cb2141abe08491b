// SPDX-License-Identifier: Apache-2.0
#include "types.h"

#define SWAPIO_ISA scalar
#include "simd_scalar-inl.h"
#include "table-inl.h"
