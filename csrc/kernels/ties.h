// SPDX-License-Identifier: Apache-2.0
// Collects the ties that the tiles of one call find.
#ifndef SWAPIO_KERNELS_TIES_H_
#define SWAPIO_KERNELS_TIES_H_

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "spans.h"

namespace swapio {

class TieCollector {
 public:
  // `piece_numel`: the most elements any piece has.
  TieCollector(const uint32_t* ties, int64_t num_ties, int64_t piece_numel)
      : in_(ties), num_in_(num_ties), piece_numel_(piece_numel) {}

  // Calls run(Ties&) with room for the piece's ties and keeps what it reports. The room is
  // allocated per thread and touched only where there are ties.
  template <class Run>
  void collect(Run&& run) {
    thread_local std::vector<uint32_t> room;
    try {
      if (static_cast<int64_t>(room.size()) < piece_numel_) {
        room.resize(static_cast<size_t>(piece_numel_));
      }
      Ties ties{in_, num_in_, room.data(), 0};
      run(ties);
      if (ties.num_out == 0) return;
      const std::lock_guard<std::mutex> lock(mutex_);
      found_.insert(found_.end(), room.data(), room.data() + ties.num_out);
    } catch (const std::bad_alloc&) {  // must not leave a pool thread
      out_of_memory_ = true;
    }
  }

  // Throws std::bad_alloc when a thread had no memory: what the call wrote is then incomplete.
  TieList sorted() {
    if (out_of_memory_) throw std::bad_alloc();
    std::sort(found_.begin(), found_.end());
    return std::move(found_);
  }

 private:
  const uint32_t* const in_;
  const int64_t num_in_;
  const int64_t piece_numel_;
  std::atomic<bool> out_of_memory_{false};
  std::mutex mutex_;
  TieList found_;
};

}  // namespace swapio

#endif  // SWAPIO_KERNELS_TIES_H_
