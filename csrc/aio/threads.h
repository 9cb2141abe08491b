// SPDX-License-Identifier: Apache-2.0
// Threads that never receive the process's signals, and waits with a clock that TSan understands.
#ifndef SWAPIO_THREADS_H_
#define SWAPIO_THREADS_H_

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace swapio {

// Starts a thread with all signals blocked: Python's handlers belong to the main thread, and a
// signal delivered here would interrupt system calls for nothing. Throws std::system_error.
template <typename Function>
std::thread start_thread(const char* name, Function&& function) {
  sigset_t all;
  sigset_t previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  std::thread thread;
  try {
    thread = std::thread(std::forward<Function>(function));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

// Waits until `ready` holds or the time is over; a negative time means for ever.
// The system clock is used on purpose: libstdc++'s steady wait calls pthread_cond_clockwait, which
// older ThreadSanitizer runtimes do not intercept; callers wait in short slices, so a clock that
// is set by hand costs at most one slice.
template <typename Predicate>
bool wait_for_ms(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                 int timeout_ms, Predicate ready) {
  if (timeout_ms < 0) {
    condition.wait(lock, ready);
    return true;
  }
  const auto deadline = std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms);
  return condition.wait_until(lock, deadline, ready);
}

}  // namespace swapio

#endif  // SWAPIO_THREADS_H_
