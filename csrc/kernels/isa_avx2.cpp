// SPDX-License-Identifier: Apache-2.0
#include "types.h"

#define SWAPIO_ISA avx2
#include "simd_avx2-inl.h"
#include "table-inl.h"
