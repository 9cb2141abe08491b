// SPDX-License-Identifier: Apache-2.0
// A kernel of our own: files in memory, completions out of order, short transfers, EINTR, EAGAIN,
// errors, and EINVAL for unaligned direct I/O. Seeded, so that a failure can be repeated.
#ifndef SWAPIO_TESTS_FAKE_BACKEND_H_
#define SWAPIO_TESTS_FAKE_BACKEND_H_

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "backend.h"
#include "file_state.h"

namespace swapio {

struct FakeFile {
  std::vector<uint8_t> bytes;
  uint64_t capacity = UINT64_MAX;    // writes beyond it: short, then ENOSPC
  uint64_t bad_offset = UINT64_MAX;  // a transfer that covers it: EIO
  uint64_t cached_bytes = 0;         // touched by buffered transfers and not dropped since
  bool has_no_memory = false;        // moves nothing, and caps each transfer as Linux does
  bool refuses_direct = false;       // at the first use, although open() went well
};

struct FakeRates {  // of each transfer, in percent
  int short_transfer = 0;
  int interrupted = 0;
  int again = 0;
};

class FakeBackend final : public Backend {
 public:
  FakeBackend(uint32_t capacity, uint64_t seed, FakeRates rates = {})
      : capacity_(capacity), rates_(rates), random_(seed) {}

  int start(Source* source) override {
    source_ = source;
    return 0;
  }
  void wake() override { ++num_wakes; }
  void stop() override {}
  uint32_t capacity() const override { return capacity_; }
  int add_file(int /*fd*/) override { return -1; }
  void remove_file(int /*slot*/) override {}
  int add_buffer(uint64_t /*address*/, uint64_t /*nbytes*/) override { return next_buffer_++; }
  void remove_buffer(int /*slot*/) override {}
  void abandon() override {}

  // Which file a descriptor belongs to, and whether it is the direct one.
  void attach(int fd, FakeFile* file, bool direct) { descriptors_[fd] = {file, direct}; }

  // Takes all that may start.
  void take_all() {
    Transfer transfer;
    while (source_->take(&transfer)) {
      held.push_back(transfer);
      num_held_max = std::max(num_held_max, held.size());
    }
  }

  // Completes one of the transfers that are held; false when there is none.
  bool step() {
    take_all();
    if (held.empty()) return false;
    return complete(random_() % held.size());
  }

  bool complete(size_t index) {
    const Transfer transfer = held[index];
    held.erase(held.begin() + static_cast<long>(index));
    const int64_t result = perform_fake(transfer);
    if (on_result) on_result(transfer, result);
    source_->complete(transfer.id, result);
    return true;
  }

  void run() {
    while (step()) {
    }
  }

  std::vector<Transfer> held;
  size_t num_held_max = 0;
  int num_wakes = 0;
  std::function<void(const Transfer&, int64_t)> on_result;

 private:
  struct Descriptor {
    FakeFile* file;
    bool direct;
  };

  bool happens(int percent) { return static_cast<int>(random_() % 100) < percent; }

  int64_t perform_fake(const Transfer& transfer) {
    const Descriptor descriptor = descriptors_.at(transfer.fd);
    FakeFile* file = descriptor.file;
    if (transfer.op == Op::kDropCache) file->cached_bytes = 0;
    if (transfer.op != Op::kRead && transfer.op != Op::kWrite) return 0;
    if (descriptor.direct) {
      const auto address = reinterpret_cast<uintptr_t>(transfer.address);
      if (file->refuses_direct) return -EINVAL;
      if ((address | transfer.nbytes | transfer.offset) % kPageBytes != 0) return -EINVAL;
    } else {
      file->cached_bytes += transfer.nbytes;
    }
    if (happens(rates_.interrupted)) return -EINTR;
    if (happens(rates_.again)) return -EAGAIN;
    uint64_t nbytes = transfer.nbytes;
    if (file->has_no_memory) return static_cast<int64_t>(std::min<uint64_t>(nbytes, 0x7ffff000));
    if (happens(rates_.short_transfer)) nbytes = 1 + random_() % nbytes;
    if (transfer.offset <= file->bad_offset && file->bad_offset < transfer.offset + nbytes) {
      return -EIO;
    }
    return transfer.op == Op::kRead ? read(*file, transfer, nbytes) : write(file, transfer, nbytes);
  }

  static int64_t read(const FakeFile& file, const Transfer& transfer, uint64_t nbytes) {
    if (transfer.offset >= file.bytes.size()) return 0;
    nbytes = std::min<uint64_t>(nbytes, file.bytes.size() - transfer.offset);
    memcpy(transfer.address, file.bytes.data() + transfer.offset, nbytes);
    return static_cast<int64_t>(nbytes);
  }

  static int64_t write(FakeFile* file, const Transfer& transfer, uint64_t nbytes) {
    if (transfer.offset >= file->capacity) return -ENOSPC;
    nbytes = std::min(nbytes, file->capacity - transfer.offset);
    const uint64_t end = transfer.offset + nbytes;
    if (end > file->bytes.size()) file->bytes.resize(end);
    memcpy(file->bytes.data() + transfer.offset, transfer.address, nbytes);
    return static_cast<int64_t>(nbytes);
  }

  const uint32_t capacity_;
  const FakeRates rates_;
  std::mt19937_64 random_;
  Source* source_ = nullptr;
  std::map<int, Descriptor> descriptors_;
  int next_buffer_ = 0;
};

}  // namespace swapio

#endif  // SWAPIO_TESTS_FAKE_BACKEND_H_
