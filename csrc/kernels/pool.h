// SPDX-License-Identifier: Apache-2.0
// The kernels' own threads, apart from torch's and OpenMP's.
//
// A call is cut into items; the caller works on them itself, and idle pool threads join it. Each
// participant takes items from the front of its own contiguous range first (so that it streams
// through memory) and then from the others' ranges. A call never waits for a thread that has not
// started, so a busy machine slows it down no more than in proportion, and any number of Python
// threads can be inside at once. Threads sleep on a condition variable when idle: no spinning.
//
// After fork the child finds no pool and makes its own at the first call.
#ifndef SWAPIO_KERNELS_POOL_H_
#define SWAPIO_KERNELS_POOL_H_

#include <cstdint>
#include <vector>

namespace swapio {

// Runs one item; `participant` is below the number of threads of the call.
using ItemFn = void (*)(void* context, int64_t item, int participant);

// Runs items 0 .. num_items - 1 on at most `max_threads` threads (0: the budget) and returns when
// all are done. Every thread has the kernels' floating-point environment while it works.
void parallel_for(int64_t num_items, int max_threads, ItemFn run, void* context);

// A larger budget is a mistake: every call would start that many threads.
constexpr int kMaxThreads = 4096;

// Sets the budget, the calling thread included (1 to kMaxThreads). `cores`: participant i of a call
// is bound to cores[i % size]; the calling thread (participant 0) is left where it is. Empty: the
// main thread's affinity mask. (OpenMP run-times with OMP_PROC_BIND narrow that mask to one core:
// name the cores.)
void set_threads(int num_threads, const std::vector<int>& cores);
int num_threads();
std::vector<int> thread_cores();
// Cores in this process's affinity mask, divided by the ranks on this machine (LOCAL_WORLD_SIZE).
int default_num_threads();
// Ends the threads; the next call starts them again.
void stop_threads();

}  // namespace swapio

#endif  // SWAPIO_KERNELS_POOL_H_
