// SPDX-License-Identifier: Apache-2.0
// The engine without system calls: what may run, in which order, and what a result means.
//
// A batch is what the caller submits under one id; it has requests (a range of one file each); a
// request is cut lazily into pieces of at most one block, which a backend moves. One mutex guards
// everything; it is never held over a system call or a copy.
#ifndef SWAPIO_CORE_H_
#define SWAPIO_CORE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "aio.h"
#include "backend.h"
#include "bounce.h"
#include "file_state.h"

namespace swapio {

struct Batch;

struct Request {
  Batch* batch = nullptr;
  FileState* file = nullptr;
  Op op = Op::kRead;
  uint32_t index = 0;  // in the batch
  uint8_t* address = nullptr;
  uint64_t begin = 0;  // of the range in the file
  uint64_t end = 0;
  uint64_t cursor = 0;  // everything before it has been cut into pieces
  uint32_t num_running = 0;
  uint32_t num_blockers = 0;
  std::vector<Request*> dependents;
  std::optional<ActiveRanges::Handle> active;
  bool failed = false;
  int error = 0;
  uint64_t failed_at = UINT64_MAX;  // offset in the file of the first byte that was not moved
  bool is_cut() const { return cursor >= end; }
};

struct Batch {
  uint64_t id = 0;
  uint32_t num_open = 0;
  uint32_t flags = 0;
  uint64_t nbytes = 0;
  std::vector<Request> requests;
};

// One transfer that a backend holds, or that waits to be handed out again.
struct Piece {
  uint64_t id = 0;  // 0: the slot is free
  Op op = Op::kRead;
  Request* request = nullptr;  // null for housekeeping of the page cache
  FileState* file = nullptr;
  uint8_t* address = nullptr;
  uint64_t nbytes = 0;
  uint64_t offset = 0;
  uint64_t done = 0;  // where the next attempt starts, aligned when direct
  uint64_t best = 0;  // bytes that are known to be moved
  uint32_t num_retries = 0;
  bool direct = false;
  BounceBuffer bounce;
};

class Core final : public Source {
 public:
  Core(std::unique_ptr<Backend> backend, uint64_t block_bytes);
  ~Core() override;
  int start();

  int submit(uint64_t id, const swapio_request* requests, uint32_t num_requests);
  bool wait(uint64_t id, int timeout_ms);
  bool wait_idle(int timeout_ms);
  bool knows(uint64_t id);
  uint32_t peek(swapio_completion* completions, uint32_t capacity);
  void release(uint64_t last_id);
  void stats(swapio_stats* stats);

  int open_file(const swapio_file_config& config);
  int close_file(int number);
  bool wait_closed(int number, int timeout_ms);
  int is_direct(int number);

  int register_memory(uint64_t address, uint64_t nbytes);
  int unregister_memory(uint64_t address);

  void shut_down();
  // True when the threads have ended and the object may be deleted.
  bool stop(int timeout_ms);
  bool is_stopped() const { return !started_; }
  void abandon();

  bool take(Transfer* transfer) override;
  void complete(uint64_t id, int64_t result) override;

 private:
  struct Registration {
    uint64_t end;
    int slot;
    uint64_t region;  // the address that was registered; large regions take several entries
  };
  struct Busy {  // time with at least one transfer of a kind in flight
    uint32_t num_running = 0;
    uint64_t since = 0;
    uint64_t nanoseconds = 0;
    uint64_t num_transfers = 0;
    uint64_t nbytes = 0;
  };

  int check(const swapio_request* requests, uint32_t num_requests) const;
  void enqueue_all(Batch* batch, const swapio_request* requests);
  void withdraw(Batch* batch);
  void enqueue(Request* request);
  void order(Request* request);
  void make_ready(Request* request);
  Piece* take_locked();
  Piece* next_ready();
  Piece* next_housekeeping();
  Piece* cut(Request* request);
  void fill(const Piece& piece, Transfer* transfer) const;
  int buffer_slot(const uint8_t* address, uint64_t nbytes) const;
  Piece* claim_slot();

  void settle(Piece* piece, int64_t result);
  bool should_retry(Piece* piece, int64_t result);
  bool advance(Piece* piece, int64_t result);
  void go_buffered(Piece* piece);
  void finish(Piece* piece, bool failed, int error);
  void fail(Request* request, uint64_t failed_at, int error);
  void finish_request(Request* request);
  void close_request(Batch* batch);
  void start_cleaning(FileState* file);
  void finish_housekeeping(FileState* file, Op op, int error);
  void leave_file(FileState* file);
  void note_start(const Piece& piece);
  void note_end(const Piece& piece);
  void close_retired();

  const uint64_t block_bytes_;
  std::unique_ptr<Backend> backend_;
  BouncePool bounce_pool_;

  std::mutex mutex_;
  std::condition_variable progress_;  // completions, closed files
  bool started_ = false;
  bool shutting_down_ = false;

  std::unordered_map<uint64_t, std::unique_ptr<Batch>> batches_;  // not complete
  std::multiset<uint64_t> awaited_;                               // ids with a caller in wait()
  std::deque<swapio_completion> completions_;
  std::unordered_set<uint64_t> unreleased_;  // ids in completions_

  std::unordered_map<int, std::unique_ptr<FileState>> files_;
  int next_file_ = 1;
  std::vector<FileState*> retired_;  // to be closed outside of the lock

  std::deque<Request*> ready_reads_;
  std::deque<Request*> ready_writes_;  // and syncs
  bool prefer_write_ = false;
  std::deque<Piece*> again_;  // pieces to be handed out again
  std::deque<FileState*> housekeeping_;

  std::vector<Piece> pieces_;
  std::vector<uint32_t> free_slots_;
  uint64_t next_sequence_ = 1;

  std::map<uint64_t, Registration> registrations_;  // by first address
  Busy reads_;
  Busy writes_;
};

}  // namespace swapio

#endif  // SWAPIO_CORE_H_
