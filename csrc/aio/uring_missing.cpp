// SPDX-License-Identifier: Apache-2.0
// Stands in for backend_uring.cpp in a build without liburing.
#include <errno.h>

#include "backend.h"

namespace swapio {

std::unique_ptr<Backend> make_uring_backend(uint32_t /*queue_depth*/) { return nullptr; }

int probe_uring() { return -ENOSYS; }

}  // namespace swapio
