/* SPDX-License-Identifier: Apache-2.0 */
/* xxh3-64, inlined once per ISA: everything in xxhash.h is static here. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#define SWAPIO_CONCAT_(a, b) a##b
#define SWAPIO_CONCAT(a, b) SWAPIO_CONCAT_(a, b)

uint64_t SWAPIO_CONCAT(swapio_xxh3_, SWAPIO_ISA)(const void* data, size_t nbytes);

uint64_t SWAPIO_CONCAT(swapio_xxh3_, SWAPIO_ISA)(const void* data, size_t nbytes) {
  return XXH3_64bits(data, nbytes);
}
