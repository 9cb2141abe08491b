// SPDX-License-Identifier: Apache-2.0
// One transfer with blocking system calls.
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "backend.h"

namespace swapio {

int64_t perform(const Transfer& transfer) {
  const auto offset = static_cast<off_t>(transfer.offset);
  ssize_t result = -1;
  switch (transfer.op) {
    case Op::kRead:
      result = pread(transfer.fd, transfer.address, transfer.nbytes, offset);
      break;
    case Op::kWrite:
      result = pwrite(transfer.fd, transfer.address, transfer.nbytes, offset);
      break;
    case Op::kFsync:
      result = fsync(transfer.fd);
      break;
    case Op::kFdatasync:
      result = fdatasync(transfer.fd);
      break;
    case Op::kSyncRange:
      result = sync_file_range(
          transfer.fd, offset, static_cast<off_t>(transfer.nbytes),
          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
      break;
    case Op::kDropCache:
      // Returns its error instead of setting errno.
      return -posix_fadvise(transfer.fd, offset, static_cast<off_t>(transfer.nbytes),
                            POSIX_FADV_DONTNEED);
  }
  return result < 0 ? -static_cast<int64_t>(errno) : static_cast<int64_t>(result);
}

}  // namespace swapio
