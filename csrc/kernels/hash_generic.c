/* SPDX-License-Identifier: Apache-2.0 */
#define SWAPIO_ISA generic
#include "hash-inl.h"
