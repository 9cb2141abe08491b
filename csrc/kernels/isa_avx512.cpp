// SPDX-License-Identifier: Apache-2.0
#include "types.h"

#define SWAPIO_ISA avx512
#include "simd_avx512-inl.h"
#include "table-inl.h"
