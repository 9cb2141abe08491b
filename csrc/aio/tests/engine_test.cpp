// SPDX-License-Identifier: Apache-2.0
// The C ABI over the real backends, with files on the disk and several threads.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "aio.h"
#include "check.h"

namespace swapio {
namespace {

constexpr uint64_t kBlock = 64 << 10;

struct Engine {
  explicit Engine(int kind, uint32_t depth = 8) {
    swapio_engine_config config = {};
    config.kind = kind;
    config.queue_depth = depth;
    config.block_bytes = kBlock;
    config.num_threads = 3;
    int error = 0;
    pointer = swapio_engine_create(&config, &error);
    CHECK_EQUAL(error, 0);
    CHECK(pointer != nullptr);
  }
  ~Engine() {
    CHECK_EQUAL(swapio_engine_stop(pointer, 30000), 0);
    swapio_engine_free(pointer);
  }
  uint64_t submit(int op, int file, void* address, uint64_t nbytes, uint64_t offset) {
    const swapio_request request = {op, file, reinterpret_cast<uintptr_t>(address), nbytes, offset};
    const uint64_t id = next_id.fetch_add(1);
    CHECK(swapio_engine_submit(pointer, id, &request, 1) >= 0);
    return id;
  }
  swapio_engine* pointer = nullptr;
  std::atomic<uint64_t> next_id{1};
};

std::string make_path() {
  const char* folder = getenv("SWAPIO_TEST_DIR");
  std::string path = std::string(folder != nullptr ? folder : ".") + "/swapio-native-XXXXXX";
  const int fd = mkstemp(path.data());
  CHECK(fd >= 0);
  close(fd);
  return path;
}

struct TestFile {
  explicit TestFile(const Engine& engine) : path(make_path()) {
    swapio_file_config config = {};
    config.buffered_fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    config.fd = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    config.direct = SWAPIO_DIRECT_AUTO;
    if (config.fd < 0) {  // no O_DIRECT here (tmpfs of an old kernel): buffered
      config.fd = config.buffered_fd;
      config.buffered_fd = -1;
      config.direct = SWAPIO_DIRECT_OFF;
    }
    config.offset_alignment = 4096;
    config.memory_alignment = 4096;
    number = swapio_file_open(engine.pointer, &config);
    CHECK(number > 0);
  }
  ~TestFile() { unlink(path.c_str()); }
  std::string path;
  int number = -1;
};

void check_all_succeeded(const Engine& engine, uint32_t count) {
  CHECK_EQUAL(swapio_engine_wait_idle(engine.pointer, -1), 1);
  std::vector<swapio_completion> done(count + 1);
  CHECK_EQUAL(swapio_engine_peek(engine.pointer, done.data(), count + 1), count);
  for (uint32_t i = 0; i < count; ++i) CHECK_EQUAL(done[i].failed_index, -1);
  swapio_engine_release(engine.pointer, done[count - 1].id);
}

void test_round_trip(int kind) {
  Engine engine(kind);
  TestFile file(engine);
  std::vector<uint8_t> source(1234567);
  std::vector<uint8_t> target(source.size());
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 7 + i / 251);
  engine.submit(SWAPIO_OP_WRITE, file.number, source.data(), source.size(), 3);
  engine.submit(SWAPIO_OP_FDATASYNC, file.number, nullptr, 0, 0);
  engine.submit(SWAPIO_OP_READ, file.number, target.data(), target.size(), 3);
  check_all_succeeded(engine, 3);
  CHECK(source == target);
}

void test_many_threads(int kind) {
  Engine engine(kind);
  TestFile file(engine);
  constexpr uint32_t kNumThreads = 4;
  constexpr uint32_t kNumRounds = 25;
  constexpr uint64_t kBytes = 3 * kBlock + 777;
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kNumThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<uint8_t> source(kBytes);
      std::vector<uint8_t> target(kBytes);
      for (uint32_t round = 0; round < kNumRounds; ++round) {
        memset(source.data(), static_cast<int>(t * kNumRounds + round), kBytes);
        engine.submit(SWAPIO_OP_WRITE, file.number, source.data(), kBytes, t * kBytes);
        const uint64_t id =
            engine.submit(SWAPIO_OP_READ, file.number, target.data(), kBytes, t * kBytes);
        while (swapio_engine_wait(engine.pointer, id, 20) == 0) {
        }
        CHECK(source == target);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check_all_succeeded(engine, 2 * kNumThreads * kNumRounds);
}

void test_files_come_and_go(int kind) {
  Engine engine(kind);
  std::vector<uint8_t> memory(kBlock, 1);
  for (int i = 0; i < 50; ++i) {
    TestFile file(engine);
    engine.submit(SWAPIO_OP_WRITE, file.number, memory.data(), memory.size(), 0);
    CHECK_EQUAL(swapio_file_close(engine.pointer, file.number), 0);
    CHECK_EQUAL(swapio_file_wait_closed(engine.pointer, file.number, -1), 1);
  }
  check_all_succeeded(engine, 50);
  swapio_stats stats = {};
  swapio_engine_stats(engine.pointer, &stats);
  CHECK_EQUAL(stats.num_files, 0);
  CHECK_EQUAL(stats.bytes_written, 50 * kBlock);
}

void test_calls_after_stop_are_refused(int kind) {
  Engine engine(kind);
  TestFile file(engine);
  CHECK_EQUAL(swapio_engine_stop(engine.pointer, -1), 0);
  const swapio_request request = {SWAPIO_OP_FSYNC, file.number, 0, 0, 0};
  CHECK_EQUAL(swapio_engine_submit(engine.pointer, 1, &request, 1), -ESHUTDOWN);
  CHECK_EQUAL(swapio_file_close(engine.pointer, file.number), -EBADF);
  CHECK(swapio_engine_register(engine.pointer, 4096, 4096) < 0);
  CHECK_EQUAL(swapio_engine_wait_idle(engine.pointer, 0), 1);
}

void test_many_engines(int kind) {
  for (int i = 0; i < 100; ++i) Engine engine(kind);
  std::vector<std::unique_ptr<Engine>> engines;
  for (int i = 0; i < 16; ++i) engines.push_back(std::make_unique<Engine>(kind));
}

void test_registered_memory(int kind) {
  Engine engine(kind);
  TestFile file(engine);
  void* memory = nullptr;
  constexpr uint64_t kBytes = 1 << 20;
  CHECK(posix_memalign(&memory, 2 << 20, kBytes) == 0);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const int registered = swapio_engine_register(engine.pointer, address, kBytes);
  CHECK(registered == 1 || registered == -ENOMEM || registered == -EOPNOTSUPP);
  memset(memory, 42, kBytes);
  engine.submit(SWAPIO_OP_WRITE, file.number, memory, kBytes, 0);
  CHECK_EQUAL(swapio_engine_wait_idle(engine.pointer, -1), 1);
  memset(memory, 0, kBytes);
  engine.submit(SWAPIO_OP_READ, file.number, memory, kBytes, 0);
  check_all_succeeded(engine, 2);
  CHECK_EQUAL(static_cast<uint8_t*>(memory)[kBytes - 1], 42);
  if (registered == 1) CHECK_EQUAL(swapio_engine_unregister(engine.pointer, address), 1);
  CHECK_EQUAL(swapio_engine_stop(engine.pointer, -1), 0);
  free(memory);
}

void test_a_child_leaves_the_parent_alone(int kind) {
  Engine engine(kind);
  TestFile file(engine);
  std::vector<uint8_t> memory(32 * kBlock, 6);
  for (uint64_t i = 0; i < 32; ++i) {
    engine.submit(SWAPIO_OP_WRITE, file.number, memory.data() + i * kBlock, kBlock, i * kBlock);
  }
  const pid_t child = fork();
  if (child == 0) {
    swapio_engine_abandon(engine.pointer);
    swapio_engine_free(engine.pointer);
    _exit(0);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
  check_all_succeeded(engine, 32);
}

std::vector<NamedTest> make_tests() {
  std::vector<NamedTest> tests;
  const std::vector<std::pair<std::string, void (*)(int)>> functions = {
      {"round_trip", test_round_trip},
      {"many_threads", test_many_threads},
      {"files_come_and_go", test_files_come_and_go},
      {"calls_after_stop_are_refused", test_calls_after_stop_are_refused},
      {"many_engines", test_many_engines},
      {"registered_memory", test_registered_memory},
      {"a_child_leaves_the_parent_alone", test_a_child_leaves_the_parent_alone},
  };
  for (const auto& [name, function] : functions) {
    tests.push_back({"threads: " + name, [f = function] { f(SWAPIO_KIND_THREADS); }});
    if (swapio_uring_probe() == 0) {
      tests.push_back({"io_uring: " + name, [f = function] { f(SWAPIO_KIND_URING); }});
    }
  }
  return tests;
}

}  // namespace
}  // namespace swapio

int main(int argc, char** argv) { return swapio::run_tests(swapio::make_tests(), argc, argv); }
