/* SPDX-License-Identifier: Apache-2.0 */
#define SWAPIO_ISA avx2
#include "hash-inl.h"
