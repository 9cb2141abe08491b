// SPDX-License-Identifier: Apache-2.0
// A pool of threads that call pread and pwrite: works on every kernel and in every sandbox.
#include <errno.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "backend.h"
#include "threads.h"

namespace swapio {
namespace {

class ThreadsBackend final : public Backend {
 public:
  explicit ThreadsBackend(uint32_t num_threads) : num_threads_(num_threads) {}

  int start(Source* source) override {
    try {
      for (uint32_t i = 0; i < num_threads_; ++i) {
        threads_.push_back(start_thread("swapio-io", [this, source] { run(source); }));
      }
    } catch (const std::system_error& error) {
      stop();
      return -error.code().value();
    }
    return 0;
  }

  void wake() override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_wakes_;
    if (num_sleeping_ > 0) condition_.notify_one();
  }

  void stop() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    condition_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  uint32_t capacity() const override { return num_threads_; }
  int add_file(int /*fd*/) override { return -1; }
  void remove_file(int /*slot*/) override {}
  int add_buffer(uint64_t /*address*/, uint64_t /*nbytes*/) override { return -EOPNOTSUPP; }
  void remove_buffer(int /*slot*/) override {}
  void abandon() override {}

 private:
  void run(Source* source) {
    uint64_t seen = 0;
    while (wait_for_work(&seen)) {
      Transfer transfer;
      while (source->take(&transfer)) {
        // Each thread that found more work wakes the next: a burst of n transfers starts n
        // threads, and one transfer starts one.
        if (transfer.more) wake();
        const int64_t result = perform(transfer);
        if (result == -EAGAIN) std::this_thread::sleep_for(std::chrono::microseconds(100));
        source->complete(transfer.id, result);
      }
    }
  }

  // The count of wakes closes the gap between a failed take() and going to sleep.
  bool wait_for_work(uint64_t* seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_sleeping_;
    condition_.wait(lock, [&] { return stopping_ || num_wakes_ != *seen; });
    --num_sleeping_;
    *seen = num_wakes_;
    return !stopping_;
  }

  const uint32_t num_threads_;
  std::mutex mutex_;
  std::condition_variable condition_;
  uint64_t num_wakes_ = 0;
  uint32_t num_sleeping_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(uint32_t num_threads) {
  return std::make_unique<ThreadsBackend>(num_threads);
}

}  // namespace swapio
