// SPDX-License-Identifier: Apache-2.0
// io_uring: one thread owns the ring, keeps it full and reaps it.
//
// Facts about io_uring, and what follows:
// - SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1) make one thread cheapest, and let only that thread
//   touch the ring: registrations are commands that it runs.
// - The completion queue has twice the entries of the submission queue, which has at least the
//   queue depth and the wake-up: it cannot overflow.
// - A thread that sleeps in io_uring_enter is woken by a read of an eventfd that is always queued.
// - SQPOLL burns a core and needs privileges on older kernels: never used.
// - A forked child shares the ring's memory unless it is told not to: MADV_DONTFORK.
#include <errno.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "backend.h"
#include "threads.h"

namespace swapio {
namespace {

constexpr uint64_t kWakeId = 0;
constexpr unsigned kNumFilesMax = 1024;
constexpr unsigned kNumBuffersMax = 256;  // of up to 1 GiB each
constexpr unsigned kNumAwaitedMax = 4;

// Tries the cheapest set of flags first; older kernels answer EINVAL.
int try_init_ring(unsigned entries, io_uring* ring) {
  constexpr unsigned kFlags[] = {
      IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CLAMP,
      IORING_SETUP_COOP_TASKRUN | IORING_SETUP_CLAMP, 0};
  int result = -EINVAL;
  for (const unsigned flags : kFlags) {
    result = io_uring_queue_init(entries, ring, flags);
    if (result != -EINVAL) break;
  }
  return result;
}

// Rings count against the user's memory lock limit, and the kernel gives the memory of a closed
// ring back a little later: ENOMEM may be over in a moment.
int init_ring(unsigned entries, io_uring* ring) {
  int result = try_init_ring(entries, ring);
  for (int attempt = 0; attempt < 20 && result == -ENOMEM; ++attempt) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    result = try_init_ring(entries, ring);
  }
  return result;
}

class SlotTable {
 public:
  void reset(unsigned num_slots) {
    free_.clear();
    for (unsigned slot = num_slots; slot > 0; --slot) free_.push_back(static_cast<int>(slot) - 1);
  }
  int get() {
    if (free_.empty()) return -1;
    const int slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void put(int slot) { free_.push_back(slot); }

 private:
  std::vector<int> free_;
};

class UringBackend final : public Backend {
 public:
  explicit UringBackend(uint32_t queue_depth) : queue_depth_(queue_depth) {}

  ~UringBackend() override {
    if (wake_fd_ >= 0) close(wake_fd_);
  }

  int start(Source* source) override {
    source_ = source;
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return -errno;
    int result = 1;
    try {
      thread_ = start_thread("swapio-uring", [this, &result] { run(&result); });
    } catch (const std::system_error& error) {
      return -error.code().value();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return result <= 0; });
    lock.unlock();
    if (result < 0) thread_.join();
    return result;
  }

  void wake() override {
    if (asleep_.exchange(false)) ring_bell();
  }

  void stop() override {
    post([this] {
      stopping_ = true;
      return 0;
    });
    thread_.join();
  }

  uint32_t capacity() const override { return queue_depth_; }

  int add_file(int fd) override {
    return call([this, fd] {
      const int slot = files_.get();
      if (slot < 0) return -1;
      if (io_uring_register_files_update(&ring_, static_cast<unsigned>(slot), &fd, 1) == 1) {
        return slot;
      }
      files_.put(slot);
      return -1;
    });
  }

  void remove_file(int slot) override {
    post([this, slot] {
      const int none = -1;
      io_uring_register_files_update(&ring_, static_cast<unsigned>(slot), &none, 1);
      files_.put(slot);
      return 0;
    });
  }

  int add_buffer(uint64_t address, uint64_t nbytes) override {
    return call([this, address, nbytes] {
      if (!has_buffers_) return -EOPNOTSUPP;
      const int slot = buffers_.get();
      if (slot < 0) return -ENOSPC;
      const int result = update_buffer(slot, address, nbytes);
      if (result >= 0) return slot;
      buffers_.put(slot);
      return result;
    });
  }

  void remove_buffer(int slot) override {
    call([this, slot] {
      update_buffer(slot, 0, 0);
      buffers_.put(slot);
      return 0;
    });
  }

  void abandon() override {
    if (wake_fd_ >= 0) close(wake_fd_);
    if (ring_.ring_fd > 0) close(ring_.ring_fd);
  }

 private:
  using Command = std::function<int()>;

  // --- commands: any thread asks, the ring's thread does ---

  // False when the thread has ended and runs no more commands.
  bool post(Command command) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (finished_) return false;
      commands_.push_back(std::move(command));
    }
    ring_bell();
    return true;
  }

  int call(Command command) {
    int result = 0;
    bool done = false;
    const bool posted = post([this, &command, &result, &done] {
      const int value = command();
      std::lock_guard<std::mutex> lock(mutex_);
      result = value;
      done = true;
      changed_.notify_all();
      return 0;
    });
    if (!posted) return -ESHUTDOWN;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done; });
    return result;
  }

  void run_commands() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!commands_.empty()) {
      Command command = std::move(commands_.front());
      commands_.pop_front();
      lock.unlock();
      command();
      lock.lock();
    }
    finished_ = stopping_;
  }

  void ring_bell() {
    const uint64_t one = 1;
    // It can only fail when the counter is full, and then the thread is awake anyway.
    const ssize_t written = write(wake_fd_, &one, sizeof one);
    static_cast<void>(written);
  }

  // --- the ring's thread ---

  void run(int* start_result) {
    const int result = set_up();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      *start_result = std::min(result, 0);
      changed_.notify_all();
    }
    if (result < 0) return;
    for (;;) {
      run_commands();
      if (stopping_) break;
      fill();
      enter();
      reap();
    }
    io_uring_queue_exit(&ring_);
  }

  int set_up() {
    const int result = init_ring(queue_depth_ + 2, &ring_);
    if (result < 0) return result;
    io_uring_ring_dontfork(&ring_);
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    const auto num_files = static_cast<unsigned>(std::min<rlim_t>(kNumFilesMax, limit.rlim_cur));
    if (io_uring_register_files_sparse(&ring_, num_files) == 0) files_.reset(num_files);
    has_buffers_ = io_uring_register_buffers_sparse(&ring_, kNumBuffersMax) == 0;
    if (has_buffers_) buffers_.reset(kNumBuffersMax);
    io_uring_register_ring_fd(&ring_);
    return 0;
  }

  // Queues what the source gives. The second look after `asleep_` is set closes the gap between
  // an empty-handed take() and a submit that saw us awake.
  void fill() {
    if (!bell_is_armed_) arm_bell();
    bool sleepy = false;
    for (;;) {
      Transfer transfer;
      while (num_in_flight_ < queue_depth_ && source_->take(&transfer)) {
        prepare(transfer);
        ++num_in_flight_;
      }
      if (num_in_flight_ == queue_depth_ || sleepy) return;
      asleep_.store(true);
      sleepy = true;
    }
  }

  io_uring_sqe* next_entry() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    while (entry == nullptr) {  // only after a refused submit
      io_uring_submit(&ring_);
      entry = io_uring_get_sqe(&ring_);
    }
    return entry;
  }

  void arm_bell() {
    io_uring_sqe* entry = next_entry();
    io_uring_prep_read(entry, wake_fd_, &bell_value_, sizeof bell_value_, 0);
    io_uring_sqe_set_data64(entry, kWakeId);
    bell_is_armed_ = true;
  }

  void prepare(const Transfer& transfer) {
    io_uring_sqe* entry = next_entry();
    const int fd = transfer.file_slot >= 0 ? transfer.file_slot : transfer.fd;
    const auto nbytes = static_cast<unsigned>(transfer.nbytes);
    const bool fixed = transfer.buffer_slot >= 0;
    switch (transfer.op) {
      case Op::kRead:
        if (fixed) {
          io_uring_prep_read_fixed(entry, fd, transfer.address, nbytes, transfer.offset,
                                   transfer.buffer_slot);
        } else {
          io_uring_prep_read(entry, fd, transfer.address, nbytes, transfer.offset);
        }
        break;
      case Op::kWrite:
        if (fixed) {
          io_uring_prep_write_fixed(entry, fd, transfer.address, nbytes, transfer.offset,
                                    transfer.buffer_slot);
        } else {
          io_uring_prep_write(entry, fd, transfer.address, nbytes, transfer.offset);
        }
        break;
      case Op::kFsync:
        io_uring_prep_fsync(entry, fd, 0);
        break;
      case Op::kFdatasync:
        io_uring_prep_fsync(entry, fd, IORING_FSYNC_DATASYNC);
        break;
      case Op::kSyncRange:
        io_uring_prep_sync_file_range(entry, fd, nbytes, transfer.offset, 7);
        break;
      case Op::kDropCache:
        io_uring_prep_fadvise(entry, fd, transfer.offset, static_cast<off_t>(transfer.nbytes),
                              POSIX_FADV_DONTNEED);
        break;
    }
    if (transfer.file_slot >= 0) entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(entry, transfer.id);
  }

  void enter() {
    const int result = io_uring_submit_and_wait(&ring_, num_awaited());
    asleep_.store(false);
    // EINTR, and EAGAIN or EBUSY when the kernel is short of memory: what was not taken stays in
    // the submission queue for the next round.
    if (result < 0 && result != -EINTR) pause();
  }

  // One completion, unless the queue is full: nothing can be started meanwhile, and waking up for
  // a few at once saves most of the switches. The device still has the rest of the queue to do.
  unsigned num_awaited() const {
    return num_in_flight_ < queue_depth_ ? 1
                                         : std::max(1u, std::min(kNumAwaitedMax, queue_depth_ / 8));
  }

  void reap() {
    reaped_.clear();
    unsigned head = 0;
    unsigned count = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      reaped_.emplace_back(io_uring_cqe_get_data64(entry), entry->res);
      ++count;
    }
    io_uring_cq_advance(&ring_, count);
    bool again = false;
    for (const auto& [id, result] : reaped_) {
      if (id == kWakeId) {
        bell_is_armed_ = false;
        continue;
      }
      --num_in_flight_;
      again = again || result == -EAGAIN;
      source_->complete(id, result);
    }
    if (again) pause();
  }

  static void pause() { std::this_thread::sleep_for(std::chrono::microseconds(100)); }

  int update_buffer(int slot, uint64_t address, uint64_t nbytes) {
    iovec memory = {reinterpret_cast<void*>(static_cast<uintptr_t>(address)), nbytes};
    __u64 tag = 0;
    return io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(slot), &memory, &tag,
                                                1);
  }

  const uint32_t queue_depth_;
  Source* source_ = nullptr;
  std::thread thread_;
  int wake_fd_ = -1;
  std::atomic<bool> asleep_{false};

  std::mutex mutex_;  // guards commands_, finished_ and the results of call()
  std::condition_variable changed_;
  std::deque<Command> commands_;
  bool finished_ = false;

  // Only the ring's thread touches these.
  io_uring ring_ = {};
  bool stopping_ = false;
  bool has_buffers_ = false;
  bool bell_is_armed_ = false;
  uint64_t bell_value_ = 0;
  uint32_t num_in_flight_ = 0;
  SlotTable files_;
  SlotTable buffers_;
  std::vector<std::pair<uint64_t, int>> reaped_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(uint32_t queue_depth) {
  return std::make_unique<UringBackend>(queue_depth);
}

int probe_uring() {
  io_uring ring = {};
  const int result = init_ring(4, &ring);
  if (result < 0) return result;
  io_uring_queue_exit(&ring);
  return 0;
}

}  // namespace swapio
