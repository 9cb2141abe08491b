// SPDX-License-Identifier: Apache-2.0
// What the core knows of one open file: descriptors, alignment, active ranges, page-cache debt.
#ifndef SWAPIO_FILE_STATE_H_
#define SWAPIO_FILE_STATE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>

namespace swapio {

struct Request;

constexpr uint64_t kPageBytes = 4096;

inline uint64_t round_down(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }
inline uint64_t round_up(uint64_t value, uint64_t alignment) {
  return round_down(value + alignment - 1, alignment);
}

// Requests of one kind (reads or writes) that are queued or running, by first page.
class ActiveRanges {
 public:
  using Map = std::multimap<uint64_t, Request*>;
  using Handle = Map::iterator;

  Handle insert(uint64_t begin, uint64_t end, Request* request) {
    longest_ = std::max(longest_, end - begin);
    return map_.emplace(begin, request);
  }
  void erase(Handle handle) {
    map_.erase(handle);
    if (map_.empty()) longest_ = 0;
  }
  // Calls visit(request) for each range that may overlap; the caller compares the ends. No range
  // that begins more than the longest one before `begin` can reach it.
  template <typename Visitor>
  void visit_near(uint64_t begin, uint64_t end, Visitor visit) const {
    const uint64_t from = begin > longest_ ? begin - longest_ : 0;
    for (auto it = map_.lower_bound(from); it != map_.end() && it->first < end; ++it) {
      visit(it->second);
    }
  }

 private:
  Map map_;
  uint64_t longest_ = 0;
};

struct FileState {
  int number = -1;
  int fd = -1;
  int buffered_fd = -1;
  int slot = -1;           // of fd in the backend's table
  int buffered_slot = -1;  // of buffered_fd
  bool direct = false;
  bool may_fall_back = false;
  uint64_t offset_alignment = kPageBytes;
  uint64_t memory_alignment = kPageBytes;
  bool closing = false;
  uint32_t num_users = 0;  // open requests and housekeeping

  ActiveRanges reads;
  ActiveRanges writes;

  // Page-cache debt of buffered transfers: touched since the last housekeeping.
  uint64_t touched_bytes = 0;
  uint64_t touched_begin = UINT64_MAX;
  uint64_t touched_end = 0;
  uint64_t cleaning_begin = 0;
  uint64_t cleaning_end = 0;
  bool is_cleaning = false;
  bool cleaning_synced = false;
  int writeback_error = 0;      // of background writeback, reported by the next write or sync
  std::deque<Request*> parked;  // held back until the page cache is cleaned

  uint64_t page_bytes() const { return std::max(kPageBytes, offset_alignment); }
  void touch(uint64_t begin, uint64_t nbytes) {
    touched_bytes += std::max(nbytes, kPageBytes);
    touched_begin = std::min(touched_begin, begin);
    touched_end = std::max(touched_end, begin + nbytes);
  }
};

}  // namespace swapio

#endif  // SWAPIO_FILE_STATE_H_
