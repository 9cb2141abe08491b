// SPDX-License-Identifier: Apache-2.0
// Aligned buffers that unaligned memory is copied through on its way to direct I/O.
#ifndef SWAPIO_BOUNCE_H_
#define SWAPIO_BOUNCE_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

namespace swapio {

struct FreeDeleter {
  void operator()(uint8_t* address) const { std::free(address); }
};
using BounceBuffer = std::unique_ptr<uint8_t, FreeDeleter>;

// Keeps a few buffers of one block for the next time. Buffers in use are at most queue_depth.
class BouncePool {
 public:
  explicit BouncePool(uint64_t block_bytes) : block_bytes_(block_bytes) {}

  // Null when memory has run out.
  BounceBuffer get() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        BounceBuffer buffer = std::move(free_.back());
        free_.pop_back();
        return buffer;
      }
    }
    void* address = nullptr;
    if (posix_memalign(&address, kAlignment, block_bytes_) != 0) return nullptr;
    return BounceBuffer(static_cast<uint8_t*>(address));
  }

  void put(BounceBuffer buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() < kNumKept) free_.push_back(std::move(buffer));
  }

 private:
  static constexpr size_t kAlignment = 4096;
  static constexpr size_t kNumKept = 8;  // a guess: 4 MiB with the default block
  const uint64_t block_bytes_;
  std::mutex mutex_;
  std::vector<BounceBuffer> free_;
};

}  // namespace swapio

#endif  // SWAPIO_BOUNCE_H_
