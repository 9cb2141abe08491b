// SPDX-License-Identifier: Apache-2.0
// The caller's side of the core: files, submission in order, waiting, completions.
#include "core.h"

#include <errno.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "threads.h"

namespace swapio {

namespace {
constexpr uint64_t kOffsetMax = static_cast<uint64_t>(INT64_MAX) - (1u << 30);

void close_if_open(int fd) {
  if (fd >= 0) close(fd);
}

bool is_sync(Op op) { return op == Op::kFsync || op == Op::kFdatasync; }
}  // namespace

Core::Core(std::unique_ptr<Backend> backend, uint64_t block_bytes)
    : block_bytes_(block_bytes), backend_(std::move(backend)), bounce_pool_(block_bytes) {
  const uint32_t num_slots = backend_->capacity();
  pieces_.resize(num_slots);
  for (uint32_t slot = num_slots; slot > 0; --slot) free_slots_.push_back(slot - 1);
}

Core::~Core() = default;

int Core::start() {
  const int result = backend_->start(this);
  started_ = result == 0;
  return result;
}

// --- files ---

int Core::open_file(const swapio_file_config& config) {
  auto file = std::make_unique<FileState>();
  file->fd = config.fd;
  file->buffered_fd = config.buffered_fd;
  file->direct = config.direct != SWAPIO_DIRECT_OFF;
  file->may_fall_back = config.direct == SWAPIO_DIRECT_AUTO;
  file->offset_alignment = std::max<uint64_t>(config.offset_alignment, 1);
  file->memory_alignment = std::max<uint64_t>(config.memory_alignment, 1);
  const int slot = backend_->add_file(file->fd);
  const int buffered_slot = file->buffered_fd >= 0 ? backend_->add_file(file->buffered_fd) : -1;
  std::lock_guard<std::mutex> lock(mutex_);
  if (shutting_down_) return -ESHUTDOWN;
  file->slot = slot;
  file->buffered_slot = buffered_slot;
  file->number = next_file_++;
  const int number = file->number;
  files_.emplace(number, std::move(file));
  return number;
}

int Core::close_file(int number) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = files_.find(number);
    if (found == files_.end() || found->second->closing) return -EBADF;
    found->second->closing = true;
    if (found->second->num_users == 0) retired_.push_back(found->second.get());
  }
  close_retired();
  return 0;
}

void Core::leave_file(FileState* file) {
  --file->num_users;
  if (file->closing && file->num_users == 0) retired_.push_back(file);
}

void Core::close_retired() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!retired_.empty()) {
    FileState* file = retired_.back();
    retired_.pop_back();
    lock.unlock();
    // A forked child, or the ring's table, may hold the open description a little longer: give the
    // lock back by name, so that the next owner need not wait for them.
    flock(file->fd, LOCK_UN);
    if (file->slot >= 0) backend_->remove_file(file->slot);
    if (file->buffered_slot >= 0) backend_->remove_file(file->buffered_slot);
    close_if_open(file->fd);
    close_if_open(file->buffered_fd);
    lock.lock();
    files_.erase(file->number);
    progress_.notify_all();
  }
}

bool Core::wait_closed(int number, int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return wait_for_ms(progress_, lock, timeout_ms, [&] { return files_.count(number) == 0; });
}

int Core::is_direct(int number) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = files_.find(number);
  return found == files_.end() ? -EBADF : static_cast<int>(found->second->direct);
}

// --- submission ---

int Core::check(const swapio_request* requests, uint32_t num_requests) const {
  for (uint32_t i = 0; i < num_requests; ++i) {
    const swapio_request& request = requests[i];
    if (request.op < SWAPIO_OP_READ || request.op > SWAPIO_OP_FDATASYNC) return -EINVAL;
    if (request.offset > kOffsetMax || request.nbytes > kOffsetMax - request.offset) {
      return -EOVERFLOW;
    }
    const bool moves = request.nbytes > 0 && !is_sync(static_cast<Op>(request.op));
    if (moves && request.address == 0) return -EFAULT;
    const auto found = files_.find(request.file);
    if (found == files_.end() || found->second->closing) return -EBADF;
  }
  return 0;
}

int Core::submit(uint64_t id, const swapio_request* requests, uint32_t num_requests) {
  auto batch = std::make_unique<Batch>();
  batch->id = id;
  batch->requests.resize(num_requests);
  int num_unreleased = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shutting_down_) return -ESHUTDOWN;
    if (batches_.count(id) != 0 || unreleased_.count(id) != 0) return -EEXIST;
    const int refused = check(requests, num_requests);
    if (refused != 0) return refused;
    Batch* raw = batch.get();
    batches_.emplace(id, std::move(batch));
    try {
      enqueue_all(raw, requests);
    } catch (...) {  // memory has run out: no thread has seen the batch, as the mutex is held
      withdraw(raw);
      unreleased_.erase(id);
      batches_.erase(id);
      throw;
    }
    num_unreleased = static_cast<int>(std::min<size_t>(completions_.size(), INT32_MAX));
  }
  backend_->wake();
  return num_unreleased;
}

void Core::enqueue_all(Batch* batch, const swapio_request* requests) {
  const auto num_requests = static_cast<uint32_t>(batch->requests.size());
  // One more than there are, so that no request can complete the batch while others are queued.
  batch->num_open = num_requests + 1;
  for (uint32_t i = 0; i < num_requests; ++i) {
    Request& request = batch->requests[i];
    const swapio_request& wanted = requests[i];
    request.batch = batch;
    request.file = files_.at(wanted.file).get();
    request.op = static_cast<Op>(wanted.op);
    request.index = i;
    request.address = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(wanted.address));
    request.begin = is_sync(request.op) ? 0 : wanted.offset;
    request.end = is_sync(request.op) ? 1 : wanted.offset + wanted.nbytes;
    request.cursor = request.begin;
    enqueue(&request);
  }
  close_request(batch);
}

// Undoes enqueue_all, wherever it was left. Allocates nothing.
void Core::withdraw(Batch* batch) {
  const auto forget = [batch](auto* requests) {
    const auto is_ours = [batch](const Request* request) { return request->batch == batch; };
    requests->erase(std::remove_if(requests->begin(), requests->end(), is_ours), requests->end());
  };
  forget(&ready_reads_);
  forget(&ready_writes_);
  for (Request& request : batch->requests) {
    if (request.batch == nullptr) break;  // not reached
    if (request.begin == request.end) continue;
    FileState* file = request.file;
    --file->num_users;
    if (request.active) {
      (request.op == Op::kRead ? file->reads : file->writes).erase(*request.active);
    }
    const auto unblock = [&](Request* earlier) { forget(&earlier->dependents); };
    file->reads.visit_near(0, UINT64_MAX, unblock);
    file->writes.visit_near(0, UINT64_MAX, unblock);
  }
}

void Core::enqueue(Request* request) {
  if (request->begin == request->end) {
    --request->batch->num_open;
    return;
  }
  ++request->file->num_users;
  order(request);
  if (request->num_blockers == 0) make_ready(request);
}

// Makes the request wait for every earlier one that it must not overtake.
void Core::order(Request* request) {
  FileState* file = request->file;
  const uint64_t page = file->page_bytes();
  const bool sync = is_sync(request->op);
  const uint64_t begin = sync ? 0 : round_down(request->begin, page);
  const uint64_t end = sync ? UINT64_MAX : round_up(request->end, page);
  const auto block = [&](Request* earlier) {
    if (round_up(earlier->end, page) <= begin) return;
    earlier->dependents.push_back(request);
    ++request->num_blockers;
  };
  file->writes.visit_near(begin, end, block);
  if (sync) return;  // a sync covers the writes before it, and nothing waits for a sync
  if (request->op == Op::kWrite) {
    file->reads.visit_near(begin, end, block);
    request->active = file->writes.insert(begin, end, request);
  } else {
    request->active = file->reads.insert(begin, end, request);
  }
}

void Core::make_ready(Request* request) {
  (request->op == Op::kRead ? ready_reads_ : ready_writes_).push_back(request);
}

// --- waiting ---

bool Core::wait(uint64_t id, int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (batches_.count(id) == 0) return true;
  const auto entry = awaited_.insert(id);
  const bool done =
      wait_for_ms(progress_, lock, timeout_ms, [&] { return batches_.count(id) == 0; });
  awaited_.erase(entry);
  return done;
}

bool Core::wait_idle(int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return wait_for_ms(progress_, lock, timeout_ms, [&] { return batches_.empty(); });
}

bool Core::knows(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  return batches_.count(id) != 0 || unreleased_.count(id) != 0;
}

uint32_t Core::peek(swapio_completion* completions, uint32_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t count = std::min<size_t>(capacity, completions_.size());
  std::copy_n(completions_.begin(), count, completions);
  return static_cast<uint32_t>(count);
}

void Core::release(uint64_t last_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (unreleased_.count(last_id) == 0) return;
  uint64_t id = 0;
  do {
    id = completions_.front().id;
    completions_.pop_front();
    unreleased_.erase(id);
  } while (id != last_id);
}

void Core::stats(swapio_stats* stats) {
  std::lock_guard<std::mutex> lock(mutex_);
  stats->bytes_read = reads_.nbytes;
  stats->bytes_written = writes_.nbytes;
  stats->num_reads = reads_.num_transfers;
  stats->num_writes = writes_.num_transfers;
  stats->read_nanoseconds = reads_.nanoseconds;
  stats->write_nanoseconds = writes_.nanoseconds;
  stats->num_batches_in_flight = batches_.size();
  stats->num_files = files_.size();
  stats->num_registered_files = 0;
  for (const auto& entry : files_) stats->num_registered_files += entry.second->slot >= 0 ? 1 : 0;
  stats->num_registered_buffers = registrations_.size();
}

// --- registered memory ---

int Core::register_memory(uint64_t address, uint64_t nbytes) {
  constexpr uint64_t kEntryBytes = 1u << 30;  // the kernel's limit for one fixed buffer
  if (nbytes == 0) return 0;
  if (address == 0 || nbytes > UINT64_MAX - address) return -EINVAL;
  unregister_memory(address);  // a second registration of a region replaces the first
  std::vector<std::pair<uint64_t, Registration>> added;
  for (uint64_t begin = address; begin < address + nbytes; begin += kEntryBytes) {
    const uint64_t end = std::min(begin + kEntryBytes, address + nbytes);
    const int slot = backend_->add_buffer(begin, end - begin);
    if (slot < 0) {
      for (const auto& entry : added) backend_->remove_buffer(entry.second.slot);
      return slot;
    }
    added.push_back({begin, Registration{end, slot, address}});
  }
  std::lock_guard<std::mutex> lock(mutex_);
  registrations_.insert(added.begin(), added.end());
  return static_cast<int>(added.size());
}

int Core::unregister_memory(uint64_t address) {
  std::vector<int> slots;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = registrations_.begin(); it != registrations_.end();) {
      if (it->second.region != address) {
        ++it;
        continue;
      }
      slots.push_back(it->second.slot);
      it = registrations_.erase(it);
    }
  }
  // Transfers in flight keep their buffer; those that start later no longer name the slot.
  for (const int slot : slots) backend_->remove_buffer(slot);
  return slots.empty() ? -ENOENT : static_cast<int>(slots.size());
}

// --- the end ---

void Core::shut_down() {
  std::lock_guard<std::mutex> lock(mutex_);
  shutting_down_ = true;
}

bool Core::stop(int timeout_ms) {
  shut_down();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto idle = [&] {
    return batches_.empty() && housekeeping_.empty() && free_slots_.size() == pieces_.size();
  };
  if (started_ && !wait_for_ms(progress_, lock, timeout_ms, idle)) return false;
  for (auto& entry : files_) {
    if (!entry.second->closing) retired_.push_back(entry.second.get());
    entry.second->closing = true;
  }
  lock.unlock();
  close_retired();
  if (started_) backend_->stop();
  started_ = false;
  return true;
}

void Core::abandon() {
  for (auto& entry : files_) {
    close_if_open(entry.second->fd);
    close_if_open(entry.second->buffered_fd);
  }
  backend_->abandon();
}

}  // namespace swapio
