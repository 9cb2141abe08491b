/* SPDX-License-Identifier: Apache-2.0 */
#define SWAPIO_ISA avx512
#include "hash-inl.h"
