// SPDX-License-Identifier: Apache-2.0
// The C ABI over the core. No exception crosses it.
#include <errno.h>
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "aio.h"
#include "core.h"

struct swapio_engine {
  swapio_engine(std::unique_ptr<swapio::Backend> backend, uint64_t block_bytes)
      : core(std::move(backend), block_bytes) {}
  swapio::Core core;
};

namespace {

constexpr uint32_t kQueueDepthMax = 4096;
constexpr uint64_t kBlockBytesMax = 1u << 30;  // one transfer stays below the kernel's 2 GiB cap

// The kernel's own layout of statx up to the fields for direct I/O: C libraries older than the
// kernel lack them, and the system call has filled 256 bytes since it exists.
struct StatxBuffer {
  uint32_t mask;
  uint8_t before[148];
  uint32_t dio_mem_align;     // at byte 152
  uint32_t dio_offset_align;  // at byte 156
  uint8_t after[96];
};
static_assert(sizeof(StatxBuffer) == 256, "struct statx has 256 bytes");
constexpr unsigned kStatxDioalign = 0x2000;

// Turns what C++ throws (memory has run out) into an errno.
template <typename Function>
int guarded(Function function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  } catch (...) {
    return -EIO;
  }
}

int create(const swapio_engine_config& config, swapio_engine** engine) {
  const bool uring = config.kind == SWAPIO_KIND_URING;
  if (config.queue_depth < 1 || config.queue_depth > kQueueDepthMax) return -EINVAL;
  if (config.block_bytes < swapio::kPageBytes || config.block_bytes > kBlockBytesMax ||
      config.block_bytes % swapio::kPageBytes != 0) {
    return -EINVAL;
  }
  if (!uring && (config.num_threads < 1 || config.num_threads > kQueueDepthMax)) return -EINVAL;
  auto backend = uring ? swapio::make_uring_backend(config.queue_depth)
                       : swapio::make_threads_backend(config.num_threads);
  if (backend == nullptr) return -ENOSYS;
  auto made = std::make_unique<swapio_engine>(std::move(backend), config.block_bytes);
  const int result = made->core.start();
  if (result == 0) *engine = made.release();
  return result;
}

}  // namespace

int swapio_uring_is_built(void) {
#ifdef SWAPIO_HAVE_URING
  return 1;
#else
  return 0;
#endif
}

int swapio_uring_probe(void) { return swapio::probe_uring(); }

int swapio_direct_alignment(int fd, uint32_t* offset_alignment, uint32_t* memory_alignment) {
  StatxBuffer buffer = {};
  *offset_alignment = swapio::kPageBytes;
  *memory_alignment = swapio::kPageBytes;
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioalign, &buffer) != 0) return -errno;
  if ((buffer.mask & kStatxDioalign) == 0) return 0;
  *offset_alignment = buffer.dio_offset_align;
  *memory_alignment = buffer.dio_mem_align;
  return 1;
}

swapio_engine* swapio_engine_create(const swapio_engine_config* config, int* error) {
  swapio_engine* engine = nullptr;
  *error = guarded([&] { return create(*config, &engine); });
  return engine;
}

void swapio_engine_shut_down(swapio_engine* engine) { engine->core.shut_down(); }

int swapio_engine_stop(swapio_engine* engine, int timeout_ms) {
  return guarded([&] { return engine->core.stop(timeout_ms) ? 0 : -ETIMEDOUT; });
}

void swapio_engine_free(swapio_engine* engine) {
  if (engine->core.is_stopped()) delete engine;
}

void swapio_engine_abandon(swapio_engine* engine) { engine->core.abandon(); }

void swapio_engine_stats(swapio_engine* engine, swapio_stats* stats) { engine->core.stats(stats); }

int swapio_file_open(swapio_engine* engine, const swapio_file_config* config) {
  const int result = guarded([&] { return engine->core.open_file(*config); });
  if (result < 0) {
    close(config->fd);
    if (config->buffered_fd >= 0) close(config->buffered_fd);
  }
  return result;
}

int swapio_file_close(swapio_engine* engine, int file) {
  return guarded([&] { return engine->core.close_file(file); });
}

int swapio_file_wait_closed(swapio_engine* engine, int file, int timeout_ms) {
  return guarded([&] { return static_cast<int>(engine->core.wait_closed(file, timeout_ms)); });
}

int swapio_file_is_direct(swapio_engine* engine, int file) {
  return guarded([&] { return engine->core.is_direct(file); });
}

int swapio_engine_submit(swapio_engine* engine, uint64_t id, const swapio_request* requests,
                         uint32_t num_requests) {
  return guarded([&] { return engine->core.submit(id, requests, num_requests); });
}

int swapio_engine_wait(swapio_engine* engine, uint64_t id, int timeout_ms) {
  return guarded([&] { return static_cast<int>(engine->core.wait(id, timeout_ms)); });
}

int swapio_engine_wait_idle(swapio_engine* engine, int timeout_ms) {
  return guarded([&] { return static_cast<int>(engine->core.wait_idle(timeout_ms)); });
}

int swapio_engine_knows(swapio_engine* engine, uint64_t id) {
  return guarded([&] { return static_cast<int>(engine->core.knows(id)); });
}

int swapio_engine_peek(swapio_engine* engine, swapio_completion* completions, uint32_t capacity) {
  return guarded([&] { return static_cast<int>(engine->core.peek(completions, capacity)); });
}

void swapio_engine_release(swapio_engine* engine, uint64_t last_id) {
  engine->core.release(last_id);
}

int swapio_engine_register(swapio_engine* engine, uint64_t address, uint64_t nbytes) {
  return guarded([&] { return engine->core.register_memory(address, nbytes); });
}

int swapio_engine_unregister(swapio_engine* engine, uint64_t address) {
  return guarded([&] { return engine->core.unregister_memory(address); });
}
