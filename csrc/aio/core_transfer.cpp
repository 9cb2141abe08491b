// SPDX-License-Identifier: Apache-2.0
// The backend's side of the core: cutting requests into pieces, and what a result means.
//
// Facts about results, and what follows:
// - A short transfer is legal at any time. The rest is asked for again, from an aligned offset when
//   it is direct I/O (an unaligned one gives EINVAL). An attempt that gets no further than the one
//   before it has met the end of the file, or is unlucky: the buffered descriptor, which needs no
//   alignment, tells. Only a transfer of 0 bytes means the end.
// - Direct I/O may be refused at the first transfer although open() accepted O_DIRECT (overlay over
//   squashfs, FUSE): EINVAL. Where the caller allows it the file goes on buffered.
// - Buffered writeback fails later, in sync_file_range; the next write or sync of the file tells.
#include <errno.h>
#include <string.h>
#include <time.h>

#include <algorithm>

#include "core.h"

namespace swapio {

namespace {
constexpr uint64_t kSlotBits = 16;
// EINTR and EAGAIN are no failures, but a kernel that says EAGAIN for ever must not hang us. The
// number has no evidence; a backend pauses between attempts.
constexpr uint32_t kNumRetriesMax = 10000;
// The page cache of a file stays below cleaning + touched + in flight: about 160 MiB.
constexpr uint64_t kCleanBytes = 32u << 20;
constexpr uint64_t kHoldBytes = 64u << 20;

uint64_t now_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

bool moves_data(Op op) { return op == Op::kRead || op == Op::kWrite; }

bool is_aligned(const uint8_t* address, uint64_t alignment) {
  return (reinterpret_cast<uintptr_t>(address) & (alignment - 1)) == 0;
}
}  // namespace

// --- handing out ---

bool Core::take(Transfer* transfer) {
  for (;;) {
    Piece* piece = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      piece = take_locked();
      if (piece == nullptr) return false;
      note_start(*piece);
      const bool unaligned =
          piece->direct && !is_aligned(piece->address, piece->file->memory_alignment);
      if (!unaligned || piece->bounce != nullptr) {
        fill(*piece, transfer);
        return true;
      }
    }
    // The copy happens outside of the lock; until complete() the piece belongs to this thread.
    piece->bounce = bounce_pool_.get();
    if (piece->bounce == nullptr) {
      complete(piece->id, -ENOMEM);
      continue;
    }
    if (piece->op == Op::kWrite) memcpy(piece->bounce.get(), piece->address, piece->nbytes);
    std::lock_guard<std::mutex> lock(mutex_);
    fill(*piece, transfer);
    return true;
  }
}

Piece* Core::take_locked() {
  if (!again_.empty()) {
    Piece* piece = again_.front();
    again_.pop_front();
    return piece;
  }
  if (free_slots_.empty()) return nullptr;
  if (!housekeeping_.empty()) return next_housekeeping();
  return next_ready();
}

Piece* Core::claim_slot() {
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  Piece* piece = &pieces_[slot];
  *piece = Piece();
  piece->id = (next_sequence_++ << kSlotBits) | slot;
  return piece;
}

// Reads and writes take turns, so that neither starves behind a long queue of the other.
Piece* Core::next_ready() {
  for (;;) {
    if (ready_reads_.empty() && ready_writes_.empty()) return nullptr;
    const bool write = ready_reads_.empty() || (prefer_write_ && !ready_writes_.empty());
    auto& queue = write ? ready_writes_ : ready_reads_;
    Request* request = queue.front();
    FileState* file = request->file;
    if (moves_data(request->op) && !file->direct && file->is_cleaning &&
        file->touched_bytes >= kHoldBytes) {
      queue.pop_front();
      file->parked.push_back(request);
      continue;
    }
    prefer_write_ = !write;
    Piece* piece = cut(request);
    if (request->is_cut()) queue.pop_front();
    return piece;
  }
}

// Direct files: [head, buffered | body, direct, in blocks | tail, buffered]. Head and tail end at
// page boundaries, so that no page is ever both in the page cache and under direct I/O: the order
// of overlapping pages keeps them apart in time.
Piece* Core::cut(Request* request) {
  Piece* piece = claim_slot();
  FileState* file = request->file;
  piece->op = request->op;
  piece->request = request;
  piece->file = file;
  ++request->num_running;
  const uint64_t begin = request->cursor;
  uint64_t end = request->end;
  if (moves_data(request->op)) {
    const uint64_t page = file->page_bytes();
    const uint64_t body_begin = round_up(request->begin, page);
    const uint64_t body_end = round_down(request->end, page);
    if (file->direct && begin < body_begin) {
      end = std::min(end, body_begin);
    } else if (file->direct && begin < body_end) {
      end = std::min(begin + block_bytes_, body_end);
      piece->direct = true;
    } else {
      end = std::min(begin + block_bytes_, end);
    }
    piece->address = request->address + (begin - request->begin);
    piece->nbytes = end - begin;
    piece->offset = begin;
  }
  request->cursor = end;
  return piece;
}

Piece* Core::next_housekeeping() {
  FileState* file = housekeeping_.front();
  housekeeping_.pop_front();
  Piece* piece = claim_slot();
  piece->op = file->cleaning_synced ? Op::kDropCache : Op::kSyncRange;
  piece->file = file;
  piece->offset = round_down(file->cleaning_begin, kPageBytes);
  piece->nbytes = round_up(file->cleaning_end, kPageBytes) - piece->offset;
  return piece;
}

void Core::fill(const Piece& piece, Transfer* transfer) const {
  const FileState& file = *piece.file;
  const bool buffered = moves_data(piece.op) && !piece.direct;
  const bool second = (buffered || piece.request == nullptr) && file.buffered_fd >= 0;
  transfer->id = piece.id;
  transfer->op = piece.op;
  transfer->fd = second ? file.buffered_fd : file.fd;
  transfer->file_slot = second ? file.buffered_slot : file.slot;
  uint8_t* base = piece.bounce != nullptr ? piece.bounce.get() : piece.address;
  transfer->address = base == nullptr ? nullptr : base + piece.done;
  transfer->nbytes = piece.nbytes - piece.done;
  transfer->offset = piece.offset + piece.done;
  transfer->buffer_slot = piece.direct && piece.bounce == nullptr
                              ? buffer_slot(transfer->address, transfer->nbytes)
                              : -1;
  transfer->more = !again_.empty() ||
                   (!free_slots_.empty() &&
                    !(housekeeping_.empty() && ready_reads_.empty() && ready_writes_.empty()));
}

int Core::buffer_slot(const uint8_t* address, uint64_t nbytes) const {
  if (registrations_.empty()) return -1;
  const auto begin = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(address));
  auto it = registrations_.upper_bound(begin);
  if (it == registrations_.begin()) return -1;
  --it;
  return begin + nbytes <= it->second.end ? it->second.slot : -1;
}

// --- results ---

void Core::complete(uint64_t id, int64_t result) {
  Piece* piece = &pieces_[id & ((1u << kSlotBits) - 1)];
  if (piece->bounce != nullptr && piece->op == Op::kRead && result > 0) {
    const uint64_t room = piece->nbytes - piece->done;
    memcpy(piece->address + piece->done, piece->bounce.get() + piece->done,
           std::min(static_cast<uint64_t>(result), room));
  }
  bool has_retired = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    note_end(*piece);
    settle(piece, result);
    has_retired = !retired_.empty();
  }
  if (has_retired) close_retired();
}

void Core::settle(Piece* piece, int64_t result) {
  if (should_retry(piece, result)) {
    again_.push_back(piece);
    return;
  }
  if (result < 0) {
    finish(piece, true, static_cast<int>(-result));
  } else if (!moves_data(piece->op)) {
    finish(piece, false, 0);
  } else if (advance(piece, result)) {
    const bool whole = piece->best >= piece->nbytes;
    finish(piece, !whole, 0);
  } else {
    again_.push_back(piece);
  }
}

bool Core::should_retry(Piece* piece, int64_t result) {
  if (result == -EINTR || result == -EAGAIN) return ++piece->num_retries <= kNumRetriesMax;
  if (result == -EINVAL && piece->direct && piece->file->may_fall_back) {
    piece->file->direct = false;
    piece->request->batch->flags |= SWAPIO_FLAG_FELL_BACK;
    go_buffered(piece);
    return true;
  }
  return false;
}

// Notes what was moved. True when the piece is over: whole, or nothing more comes.
bool Core::advance(Piece* piece, int64_t result) {
  const uint64_t reached = std::min(piece->done + static_cast<uint64_t>(result), piece->nbytes);
  const bool further = reached > piece->best;
  piece->best = std::max(piece->best, reached);
  if (reached == piece->nbytes || result == 0) return true;
  if (piece->direct && further) {
    piece->done = round_down(reached, piece->file->page_bytes());
    return false;
  }
  if (piece->direct) go_buffered(piece);
  piece->done = piece->best;
  return false;
}

void Core::go_buffered(Piece* piece) {
  piece->direct = false;
  if (piece->bounce != nullptr) bounce_pool_.put(std::move(piece->bounce));
}

void Core::finish(Piece* piece, bool failed, int error) {
  Request* request = piece->request;
  FileState* file = piece->file;
  const bool touched_cache = moves_data(piece->op) && !piece->direct;
  if (moves_data(piece->op)) {
    Busy& busy = piece->op == Op::kRead ? reads_ : writes_;
    busy.nbytes += piece->best;
    ++busy.num_transfers;
    if (request != nullptr) request->batch->nbytes += piece->best;
  }
  if (touched_cache) file->touch(piece->offset, piece->nbytes);
  const uint64_t failed_at = piece->offset + piece->best;
  if (piece->bounce != nullptr) bounce_pool_.put(std::move(piece->bounce));
  const Op op = piece->op;
  free_slots_.push_back(static_cast<uint32_t>(piece->id & ((1u << kSlotBits) - 1)));
  piece->id = 0;
  if (request == nullptr) {
    finish_housekeeping(file, op, error);
    return;
  }
  if (touched_cache) start_cleaning(file);
  if (failed) fail(request, failed_at, error);
  --request->num_running;
  if (request->is_cut() && request->num_running == 0) finish_request(request);
}

// The rest of a failed request is not worth the wear; what runs is waited for.
void Core::fail(Request* request, uint64_t failed_at, int error) {
  if (!request->failed || failed_at < request->failed_at) request->error = error;
  request->failed = true;
  request->failed_at = std::min(request->failed_at, failed_at);
  if (request->is_cut()) return;
  request->failed_at = std::min(request->failed_at, request->cursor);
  request->cursor = request->end;
  for (auto* queue : {&ready_reads_, &ready_writes_, &request->file->parked}) {
    queue->erase(std::remove(queue->begin(), queue->end(), request), queue->end());
  }
}

void Core::finish_request(Request* request) {
  FileState* file = request->file;
  if (request->op != Op::kRead && file->writeback_error != 0) {
    fail(request, request->begin, file->writeback_error);
    file->writeback_error = 0;
  }
  if (request->active) {
    (request->op == Op::kRead ? file->reads : file->writes).erase(*request->active);
  }
  for (Request* dependent : request->dependents) {
    if (--dependent->num_blockers == 0) make_ready(dependent);
  }
  leave_file(file);
  close_request(request->batch);
}

void Core::close_request(Batch* batch) {
  if (--batch->num_open > 0) return;
  swapio_completion completion = {};
  completion.id = batch->id;
  completion.transferred = batch->nbytes;
  completion.failed_index = -1;
  completion.flags = batch->flags;
  for (const Request& request : batch->requests) {
    if (!request.failed) continue;
    completion.failed_index = static_cast<int32_t>(request.index);
    completion.error = request.error;
    completion.failed_transferred = request.failed_at - request.begin;
    break;
  }
  unreleased_.insert(completion.id);
  completions_.push_back(completion);
  batches_.erase(completion.id);
  // A caller is only woken for its own batch, or for the last one (wait_idle, stop): with many in
  // flight the rest would be switches for nothing.
  if (batches_.empty() || awaited_.count(completion.id) != 0) progress_.notify_all();
}

// --- the page cache ---

void Core::start_cleaning(FileState* file) {
  if (file->is_cleaning || file->touched_bytes < kCleanBytes) return;
  file->is_cleaning = true;
  file->cleaning_synced = false;
  file->cleaning_begin = file->touched_begin;
  file->cleaning_end = file->touched_end;
  file->touched_bytes = 0;
  file->touched_begin = UINT64_MAX;
  file->touched_end = 0;
  ++file->num_users;
  housekeeping_.push_back(file);
}

void Core::finish_housekeeping(FileState* file, Op op, int error) {
  if (op == Op::kSyncRange) {
    // Other errors say that this kind of file has no such call, not that data was lost.
    if (error == EIO || error == ENOSPC || error == EDQUOT) file->writeback_error = error;
    file->cleaning_synced = true;
    housekeeping_.push_back(file);
    return;
  }
  file->is_cleaning = false;
  while (!file->parked.empty()) {
    Request* request = file->parked.back();
    file->parked.pop_back();
    (request->op == Op::kRead ? ready_reads_ : ready_writes_).push_front(request);
  }
  start_cleaning(file);
  leave_file(file);
  progress_.notify_all();
}

// --- statistics ---

void Core::note_start(const Piece& piece) {
  if (!moves_data(piece.op)) return;
  Busy& busy = piece.op == Op::kRead ? reads_ : writes_;
  if (busy.num_running++ == 0) busy.since = now_nanoseconds();
}

void Core::note_end(const Piece& piece) {
  if (!moves_data(piece.op)) return;
  Busy& busy = piece.op == Op::kRead ? reads_ : writes_;
  if (--busy.num_running == 0) busy.nanoseconds += now_nanoseconds() - busy.since;
}

}  // namespace swapio
