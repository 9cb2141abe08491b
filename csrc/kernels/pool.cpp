// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "cpu.h"

namespace swapio {
namespace {

// The main thread's mask stands for the process: the thread that happens to call first may be bound
// to its own share of the cores, which the pool's threads would inherit.
cpu_set_t process_mask() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(getpid(), sizeof mask, &mask) != 0) CPU_ZERO(&mask);
  return mask;
}

struct alignas(64) Range {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

struct Job {
  ItemFn run;
  void* context;
  std::vector<Range> ranges;
  // Guarded by the pool's mutex.
  int joined = 1;   // the caller is participant 0
  int working = 0;  // helpers that have joined and not finished

  Job(int64_t num_items, int num_participants, ItemFn run_, void* context_)
      : run(run_), context(context_), ranges(static_cast<size_t>(num_participants)) {
    for (int i = 0; i < num_participants; i++) {
      ranges[static_cast<size_t>(i)].next.store(num_items * i / num_participants,
                                                std::memory_order_relaxed);
      ranges[static_cast<size_t>(i)].end = num_items * (i + 1) / num_participants;
    }
  }

  void work(int participant) {
    const FloatEnvironment environment;
    const size_t num = ranges.size();
    for (size_t k = 0; k < num; k++) {
      Range& range = ranges[(static_cast<size_t>(participant) + k) % num];
      for (;;) {
        const int64_t item = range.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= range.end) break;
        run(context, item, participant);
      }
    }
  }
};

class Pool {
 public:
  Pool(int num_threads, std::vector<int> cores)
      : num_threads_(num_threads), cores_(std::move(cores)) {}
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  const std::vector<int>& cores() const { return cores_; }

  void execute(int64_t num_items, int num_participants, ItemFn run, void* context) {
    Job job(num_items, num_participants, run, context);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      start_threads();
      jobs_.push_back(&job);
    }
    for (int i = 1; i < num_participants; i++) wake_.notify_one();
    job.work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));  // nobody joins from here on
    finished_.wait(lock, [&job] { return job.working == 0; });
  }

 private:
  // Lazily, so that a process that only imports the module has no threads.
  void start_threads() {
    try {
      while (static_cast<int>(threads_.size()) < num_threads_ - 1) {
        const size_t index = threads_.size() + 1;
        threads_.emplace_back([this, index] { serve(index); });
      }
    } catch (const std::system_error&) {
      // The process may start no more threads: those there are, and the caller, do the work.
    }
  }

  void bind(size_t index) const {
    cpu_set_t mask = process_mask();
    if (!cores_.empty()) {
      CPU_ZERO(&mask);
      CPU_SET(static_cast<size_t>(cores_[index % cores_.size()]), &mask);
    }
    // The cores were checked when they were set; one that went offline since is not worth a
    // failure.
    pthread_setaffinity_np(pthread_self(), sizeof mask, &mask);
  }

  Job* joinable() {
    for (Job* job : jobs_) {
      if (job->joined < static_cast<int>(job->ranges.size())) return job;
    }
    return nullptr;
  }

  void serve(size_t index) {
    pthread_setname_np(pthread_self(), "swapio-kernel");
    bind(index);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [this, &job] { return stopping_ || (job = joinable()) != nullptr; });
      if (job == nullptr) return;
      const int participant = job->joined++;
      job->working++;
      lock.unlock();
      job->work(participant);
      lock.lock();
      if (--job->working == 0) finished_.notify_all();
    }
  }

  const int num_threads_;
  const std::vector<int> cores_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::vector<std::thread> threads_;
  std::vector<Job*> jobs_;
  bool stopping_ = false;
};

struct Global {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;
};

// Never destroyed: a daemon thread may still be inside a call when static objects go.
Global& global() {
  static Global* const instance = new Global;
  return *instance;
}

void before_fork() { global().mutex.lock(); }
void after_fork_parent() { global().mutex.unlock(); }
void after_fork_child() {
  // The parent's threads do not exist here and its mutexes are in an unknown state: keep the
  // settings, let go of the object without running its destructor.
  Global& g = global();
  if (g.pool) {
    auto* const abandoned = new std::shared_ptr<Pool>(g.pool);
    g.pool = std::make_shared<Pool>((*abandoned)->num_threads(), (*abandoned)->cores());
  }
  g.mutex.unlock();
}

std::shared_ptr<Pool> current_pool() {
  static const int registered = pthread_atfork(before_fork, after_fork_parent, after_fork_child);
  (void)registered;
  Global& g = global();
  const std::lock_guard<std::mutex> lock(g.mutex);
  if (!g.pool) g.pool = std::make_shared<Pool>(default_num_threads(), std::vector<int>{});
  return g.pool;
}

void replace_pool(std::shared_ptr<Pool> fresh) {
  current_pool();  // registers the fork handlers
  Global& g = global();
  {
    const std::lock_guard<std::mutex> lock(g.mutex);
    g.pool.swap(fresh);
  }
  // The old pool ends here, outside the lock, or with the last call that still uses it.
}

}  // namespace

int default_num_threads() {
  const cpu_set_t mask = process_mask();
  int cores = CPU_COUNT(&mask);
  if (cores == 0) cores = static_cast<int>(std::thread::hardware_concurrency());
  const char* ranks = std::getenv("LOCAL_WORLD_SIZE");
  const int num_ranks = ranks == nullptr ? 1 : std::max(1, std::atoi(ranks));
  return std::max(1, cores / num_ranks);
}

void set_threads(int num_threads, const std::vector<int>& cores) {
  replace_pool(std::make_shared<Pool>(num_threads, cores));
}

int num_threads() { return current_pool()->num_threads(); }

std::vector<int> thread_cores() { return current_pool()->cores(); }

void stop_threads() {
  const std::shared_ptr<Pool> old = current_pool();
  replace_pool(std::make_shared<Pool>(old->num_threads(), old->cores()));
}

void parallel_for(int64_t num_items, int max_threads, ItemFn run, void* context) {
  if (num_items <= 0) return;
  const std::shared_ptr<Pool> pool = current_pool();
  int participants = pool->num_threads();
  if (max_threads > 0) participants = std::min(participants, max_threads);
  participants = static_cast<int>(std::min<int64_t>(participants, num_items));
  if (participants > 1) {
    pool->execute(num_items, participants, run, context);
    return;
  }
  const FloatEnvironment environment;
  for (int64_t item = 0; item < num_items; item++) run(context, item, 0);
}

}  // namespace swapio
