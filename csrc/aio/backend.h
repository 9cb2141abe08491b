// SPDX-License-Identifier: Apache-2.0
// The seam between the engine's core and the ways of moving bytes.
//
// The core decides what may run and what a result means; a backend only moves bytes. A backend
// takes transfers from the Source, as many as the Source gives, and reports each exactly once.
#ifndef SWAPIO_BACKEND_H_
#define SWAPIO_BACKEND_H_

#include <cstdint>
#include <memory>

namespace swapio {

enum class Op : int32_t {
  kRead = 0,
  kWrite = 1,
  kFsync = 2,
  kFdatasync = 3,
  kSyncRange = 4,
  kDropCache = 5
};

struct Transfer {
  uint64_t id = 0;  // unique over the life of the engine, never 0
  Op op = Op::kRead;
  int fd = -1;
  int file_slot = -1;  // the backend's own number for fd, or -1
  uint8_t* address = nullptr;
  uint64_t nbytes = 0;  // at most 1 GiB for reads and writes
  uint64_t offset = 0;
  int buffer_slot = -1;  // registered memory that holds the whole transfer, or -1
  bool more = false;     // another transfer was ready when this one was taken
};

// What a backend sees of the core. Both calls are thread safe.
class Source {
 public:
  virtual ~Source() = default;
  // Gives the next transfer that may start. False: nothing now; the core calls wake() later.
  virtual bool take(Transfer* transfer) = 0;
  // `result` is what the system call returned: bytes, or a negated errno.
  virtual void complete(uint64_t id, int64_t result) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  // Starts the threads. Returns 0 or a negated errno.
  virtual int start(Source* source) = 0;
  // Says that take() may succeed again. Any thread, cheap when nobody sleeps, never blocks.
  virtual void wake() = 0;
  // Ends the threads. Only called when nothing is in flight.
  virtual void stop() = 0;
  // Most transfers that take() may hand out at once.
  virtual uint32_t capacity() const = 0;

  // Optional fast paths. A slot is a number that the core passes back in Transfer; -1: none left.
  virtual int add_file(int fd) = 0;
  virtual void remove_file(int slot) = 0;
  // A negated errno when the kernel refuses.
  virtual int add_buffer(uint64_t address, uint64_t nbytes) = 0;
  virtual void remove_buffer(int slot) = 0;
  // In a forked child: closes descriptors without any lock.
  virtual void abandon() = 0;
};

// Performs a transfer with blocking system calls.
int64_t perform(const Transfer& transfer);

std::unique_ptr<Backend> make_threads_backend(uint32_t num_threads);
// Null, and a refusal, in a build without liburing.
std::unique_ptr<Backend> make_uring_backend(uint32_t queue_depth);
int probe_uring();

}  // namespace swapio

#endif  // SWAPIO_BACKEND_H_
