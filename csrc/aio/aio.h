/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI as the C++ sources and the generated cffi module include it. */
#ifndef SWAPIO_AIO_H_
#define SWAPIO_AIO_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#include "aio.cdef.h"
#ifdef __cplusplus
}
#endif

#endif /* SWAPIO_AIO_H_ */
