// SPDX-License-Identifier: Apache-2.0
// Cuts a list of runs into tiles of about equal size.
#ifndef SWAPIO_KERNELS_TILES_H_
#define SWAPIO_KERNELS_TILES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool.h"

namespace swapio {

// The runs are laid end to end, each padded to a multiple of kCutNumel, and the line is cut every
// `tile_numel`: a tile is part of a long run or several short ones, and cuts inside a run fall on
// multiples of kCutNumel from its start, which keeps its alignment.
class Tiles {
 public:
  static constexpr int64_t kCutNumel = 64;

  template <class Runs>
  Tiles(const Runs* runs, int64_t num_runs, int64_t tile_numel) : tile_numel_(tile_numel) {
    starts_.reserve(static_cast<size_t>(num_runs) + 1);
    int64_t total = 0;
    for (int64_t i = 0; i < num_runs; i++) {
      starts_.push_back(total);
      numels_.push_back(runs[i].numel);
      total += (runs[i].numel + kCutNumel - 1) / kCutNumel * kCutNumel;
    }
    starts_.push_back(total);
  }

  int64_t num_tiles() const { return (starts_.back() + tile_numel_ - 1) / tile_numel_; }

  // visit(run_index, first_element, numel) for each piece of a run in the tile.
  template <class Visit>
  void visit(int64_t tile, Visit&& visit) const {
    const int64_t begin = tile * tile_numel_;
    const int64_t end = std::min(begin + tile_numel_, starts_.back());
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
    for (int64_t run = after - starts_.begin() - 1; run < static_cast<int64_t>(numels_.size());
         run++) {
      const int64_t start = starts_[static_cast<size_t>(run)];
      if (start >= end) break;
      const int64_t first = std::max<int64_t>(begin - start, 0);
      const int64_t last = std::min(end - start, numels_[static_cast<size_t>(run)]);
      if (first < last) visit(run, first, last - first);
    }
  }

 private:
  const int64_t tile_numel_;
  std::vector<int64_t> starts_;
  std::vector<int64_t> numels_;
};

// Runs body(item, participant) for all items on the pool.
template <class Body>
void for_each_item(int64_t num_items, int max_threads, const Body& body) {
  parallel_for(
      num_items, max_threads,
      [](void* context, int64_t item, int participant) {
        (*static_cast<const Body*>(context))(item, participant);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

template <class T = void>
const T* pointer(uint64_t address) {
  return reinterpret_cast<const T*>(static_cast<uintptr_t>(address));
}
template <class T = void>
T* mutable_pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

}  // namespace swapio

#endif  // SWAPIO_KERNELS_TILES_H_
