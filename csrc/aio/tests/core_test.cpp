// SPDX-License-Identifier: Apache-2.0
// The core over a fake kernel: order, cutting, results, the page cache, closing.
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <random>

#include "check.h"
#include "fake_backend.h"

namespace {
int num_allocations_left = -1;  // before memory runs out; negative: it does not
}  // namespace

// Not inlined: gcc would take the pair for a mismatch.
[[gnu::noinline]] void* operator new(size_t nbytes) {
  if (num_allocations_left == 0) throw std::bad_alloc();
  if (num_allocations_left > 0) --num_allocations_left;
  void* memory = std::malloc(nbytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t /*nbytes*/) noexcept {
  std::free(memory);
}

namespace swapio {
namespace {

constexpr uint64_t kBlock = 4 * kPageBytes;

// A core with one fake file.
struct Fixture {
  explicit Fixture(uint32_t depth = 4, uint64_t seed = 1, FakeRates rates = {},
                   int direct = SWAPIO_DIRECT_AUTO, uint64_t block = kBlock)
      : backend(new FakeBackend(depth, seed, rates)),
        core(std::unique_ptr<Backend>(backend), block) {
    CHECK_EQUAL(core.start(), 0);
    swapio_file_config config = {};
    config.fd = open("/dev/null", O_RDWR);
    config.buffered_fd = direct == SWAPIO_DIRECT_OFF ? -1 : open("/dev/null", O_RDWR);
    config.direct = direct;
    config.offset_alignment = kPageBytes;
    config.memory_alignment = kPageBytes;
    backend->attach(config.fd, &file, direct != SWAPIO_DIRECT_OFF);
    if (config.buffered_fd >= 0) backend->attach(config.buffered_fd, &file, false);
    number = core.open_file(config);
    CHECK(number > 0);
  }
  ~Fixture() {
    backend->run();
    CHECK(core.stop(0));
  }

  // Lives as long as the fixture, whose end may still complete transfers.
  uint8_t* pages(uint64_t nbytes) {
    void* address = nullptr;
    CHECK(posix_memalign(&address, kPageBytes, round_up(nbytes, kPageBytes) + kPageBytes) == 0);
    memory.emplace_back(static_cast<uint8_t*>(address));
    return memory.back().get();
  }
  uint64_t submit(int op, void* address, uint64_t nbytes, uint64_t offset) {
    const swapio_request request = {op, number, reinterpret_cast<uintptr_t>(address), nbytes,
                                    offset};
    CHECK(core.submit(next_id, &request, 1) >= 0);
    return next_id++;
  }
  swapio_completion completion() {
    swapio_completion completion = {};
    CHECK_EQUAL(core.peek(&completion, 1), 1);
    core.release(completion.id);
    return completion;
  }

  std::vector<BounceBuffer> memory;
  FakeFile file;
  FakeBackend* backend;  // owned by the core
  Core core;
  int number = -1;
  uint64_t next_id = 1;
};

void test_round_trips_at_any_offset_length_and_address() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 150; ++round) {
    Fixture fixture(1 + static_cast<uint32_t>(random() % 6), random(), FakeRates{30, 10, 10});
    const uint64_t offset = random() % (2 * kBlock);
    const uint64_t nbytes = 1 + random() % (5 * kBlock);
    const uint64_t shift = random() % 3 == 0 ? 0 : random() % kPageBytes;
    uint8_t* source = fixture.pages(nbytes + shift);
    uint8_t* target = fixture.pages(nbytes + shift);
    for (uint64_t i = 0; i < nbytes; ++i) source[shift + i] = static_cast<uint8_t>(random());
    fixture.submit(SWAPIO_OP_WRITE, source + shift, nbytes, offset);
    fixture.submit(SWAPIO_OP_READ, target + shift, nbytes, offset);
    fixture.backend->run();
    for (int i = 0; i < 2; ++i) {
      const swapio_completion done = fixture.completion();
      CHECK_EQUAL(done.failed_index, -1);
      CHECK_EQUAL(done.transferred, nbytes);
      CHECK_EQUAL(done.flags, 0);  // no unaligned direct transfer was ever tried
    }
    CHECK(memcmp(source + shift, target + shift, nbytes) == 0);
    CHECK_EQUAL(fixture.file.bytes.size(), offset + nbytes);
  }
}

// Many random overlapping requests must leave memory and file as if done one after the other.
void test_overlapping_requests_keep_their_order() {
  constexpr uint64_t kFileBytes = 16 * kPageBytes;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    std::mt19937_64 random(seed);
    Fixture fixture(8, seed, FakeRates{20, 5, 5});
    fixture.file.bytes.assign(kFileBytes, 0);
    std::vector<uint8_t> model(kFileBytes, 0);
    std::vector<std::pair<uint8_t*, std::vector<uint8_t>>> expected;
    for (int i = 0; i < 60; ++i) {
      const uint64_t offset = random() % (kFileBytes - 1);
      const uint64_t nbytes = 1 + random() % (kFileBytes - offset);
      uint8_t* address = fixture.pages(nbytes);
      if (random() % 2 == 0) {
        memset(address, i + 1, nbytes);
        memset(model.data() + offset, i + 1, nbytes);
        fixture.submit(SWAPIO_OP_WRITE, address, nbytes, offset);
      } else {
        const auto begin = model.begin() + static_cast<long>(offset);
        expected.push_back({address, {begin, begin + static_cast<long>(nbytes)}});
        fixture.submit(SWAPIO_OP_READ, address, nbytes, offset);
      }
      if (random() % 3 == 0) fixture.backend->step();
    }
    fixture.backend->run();
    CHECK(fixture.file.bytes == model);
    for (const auto& [address, bytes] : expected) {
      CHECK(memcmp(address, bytes.data(), bytes.size()) == 0);
    }
  }
}

void test_requests_that_do_not_overlap_run_together() {
  Fixture fixture(8);
  uint8_t* memory = fixture.pages(8 * kPageBytes);
  for (uint64_t i = 0; i < 8; ++i) {
    fixture.submit(SWAPIO_OP_WRITE, memory, kPageBytes, i * kPageBytes);
  }
  fixture.backend->take_all();
  CHECK_EQUAL(fixture.backend->held.size(), 8);
}

void test_a_sync_waits_for_earlier_writes_and_holds_up_nothing() {
  Fixture fixture(8);
  uint8_t* memory = fixture.pages(kPageBytes);
  fixture.submit(SWAPIO_OP_WRITE, memory, kPageBytes, 0);
  fixture.submit(SWAPIO_OP_FSYNC, nullptr, 0, 0);
  fixture.submit(SWAPIO_OP_WRITE, memory, kPageBytes, 8 * kPageBytes);
  fixture.backend->take_all();
  CHECK_EQUAL(fixture.backend->held.size(), 2);
  CHECK(fixture.backend->held[0].op == Op::kWrite && fixture.backend->held[1].op == Op::kWrite);
  fixture.backend->complete(0);
  fixture.backend->take_all();
  CHECK(fixture.backend->held.back().op == Op::kFsync);
}

void test_in_flight_never_exceeds_the_depth() {
  Fixture fixture(4);
  uint8_t* memory = fixture.pages(kPageBytes);
  fixture.file.bytes.assign(kPageBytes, 1);
  for (int i = 0; i < 10000; ++i) fixture.submit(SWAPIO_OP_READ, memory, kPageBytes, 0);
  fixture.backend->run();
  CHECK_EQUAL(fixture.backend->num_held_max, 4);
  std::vector<swapio_completion> done(20000);
  CHECK_EQUAL(fixture.core.peek(done.data(), 20000), 10000);
}

void test_reads_and_writes_take_turns() {
  Fixture fixture(4);
  fixture.file.bytes.assign(64 * kBlock, 1);
  uint8_t* memory = fixture.pages(64 * kBlock);
  fixture.submit(SWAPIO_OP_WRITE, memory, 32 * kBlock, 0);
  fixture.submit(SWAPIO_OP_READ, memory, 32 * kBlock, 32 * kBlock);
  fixture.backend->take_all();
  const auto& held = fixture.backend->held;
  CHECK_EQUAL(std::count_if(held.begin(), held.end(),
                            [](const Transfer& transfer) { return transfer.op == Op::kRead; }),
              2);
}

void test_a_read_that_ends_early_is_an_error_with_the_bytes_that_came() {
  for (const uint64_t file_bytes : {uint64_t{0}, uint64_t{1}, kPageBytes, kBlock + 904}) {
    Fixture fixture;
    fixture.file.bytes.assign(file_bytes, 9);
    uint8_t* memory = fixture.pages(3 * kBlock);
    fixture.submit(SWAPIO_OP_READ, memory, 3 * kBlock, 0);
    fixture.backend->run();
    const swapio_completion done = fixture.completion();
    CHECK_EQUAL(done.failed_index, 0);
    CHECK_EQUAL(done.error, 0);
    CHECK_EQUAL(done.failed_transferred, file_bytes);
  }
}

void test_a_full_disk_is_an_error_of_the_write() {
  Fixture fixture;
  fixture.file.capacity = 2 * kBlock + 512;
  uint8_t* memory = fixture.pages(64 * kBlock);
  fixture.submit(SWAPIO_OP_WRITE, memory, 64 * kBlock, 0);
  fixture.backend->run();
  const swapio_completion done = fixture.completion();
  CHECK_EQUAL(done.error, ENOSPC);
  CHECK_EQUAL(done.failed_transferred, 2 * kBlock + 512);
}

void test_one_bad_request_of_a_batch_leaves_the_others_and_the_next_batch_alone() {
  Fixture fixture;
  fixture.file.bytes.assign(8 * kBlock, 5);
  fixture.file.bad_offset = 3 * kBlock + 1;
  uint8_t* memory = fixture.pages(8 * kBlock);
  swapio_request requests[8];
  for (uint64_t i = 0; i < 8; ++i) {
    requests[i] = {SWAPIO_OP_READ, fixture.number, reinterpret_cast<uintptr_t>(memory) + i * kBlock,
                   kBlock, i * kBlock};
  }
  CHECK(fixture.core.submit(100, requests, 8) >= 0);
  fixture.backend->run();
  const swapio_completion done = fixture.completion();
  CHECK_EQUAL(done.failed_index, 3);
  CHECK_EQUAL(done.error, EIO);
  CHECK_EQUAL(memory[7 * kBlock], 5);
  fixture.file.bad_offset = UINT64_MAX;
  CHECK(fixture.core.submit(101, requests, 8) >= 0);
  fixture.backend->run();
  CHECK_EQUAL(fixture.completion().failed_index, -1);
}

void test_late_refusal_of_direct_io_falls_back_once() {
  Fixture fixture;
  fixture.file.refuses_direct = true;
  uint8_t* memory = fixture.pages(6 * kBlock);
  memset(memory, 3, 6 * kBlock);
  fixture.submit(SWAPIO_OP_WRITE, memory + 1, 5 * kBlock, 0);
  fixture.backend->run();
  const swapio_completion done = fixture.completion();
  CHECK_EQUAL(done.failed_index, -1);
  CHECK_EQUAL(done.flags, SWAPIO_FLAG_FELL_BACK);
  CHECK_EQUAL(fixture.core.is_direct(fixture.number), 0);
  CHECK(fixture.file.bytes == std::vector<uint8_t>(5 * kBlock, 3));
  fixture.submit(SWAPIO_OP_READ, memory, kBlock, 0);
  fixture.backend->run();
  CHECK_EQUAL(fixture.completion().flags, 0);
}

void test_late_refusal_is_an_error_where_direct_io_is_required() {
  Fixture fixture(4, 1, {}, SWAPIO_DIRECT_REQUIRED);
  fixture.file.refuses_direct = true;
  uint8_t* memory = fixture.pages(kBlock);
  fixture.submit(SWAPIO_OP_WRITE, memory, kBlock, 0);
  fixture.backend->run();
  CHECK_EQUAL(fixture.completion().error, EINVAL);
}

void test_endless_again_becomes_an_error() {
  Fixture fixture(4, 1, FakeRates{0, 0, 100});
  uint8_t* memory = fixture.pages(kPageBytes);
  fixture.submit(SWAPIO_OP_WRITE, memory, kPageBytes, 0);
  fixture.backend->run();
  CHECK_EQUAL(fixture.completion().error, EAGAIN);
}

void test_buffered_transfers_keep_the_page_cache_small() {
  constexpr uint64_t kMega = 1 << 20;
  Fixture fixture(16, 3, {}, SWAPIO_DIRECT_OFF, kMega);
  uint64_t cached_max = 0;
  fixture.backend->on_result = [&](const Transfer&, int64_t) {
    cached_max = std::max(cached_max, fixture.file.cached_bytes);
  };
  uint8_t* memory = fixture.pages(64 * kMega);
  fixture.file.bytes.assign(64 * kMega, 0);
  for (int i = 0; i < 20; ++i) fixture.submit(SWAPIO_OP_WRITE, memory, 64 * kMega, 0);
  fixture.backend->run();
  CHECK(cached_max < 256 * kMega);
  CHECK(fixture.file.cached_bytes < 64 * kMega);
}

void test_a_closed_file_ends_with_its_last_transfer() {
  Fixture fixture;
  uint8_t* memory = fixture.pages(kPageBytes);
  fixture.submit(SWAPIO_OP_WRITE, memory, kPageBytes, 0);
  CHECK_EQUAL(fixture.core.close_file(fixture.number), 0);
  CHECK(!fixture.core.wait_closed(fixture.number, 0));
  const swapio_request request = {SWAPIO_OP_READ, fixture.number, 1, 1, 0};
  CHECK_EQUAL(fixture.core.submit(99, &request, 1), -EBADF);
  fixture.backend->run();
  CHECK(fixture.core.wait_closed(fixture.number, 0));
  CHECK_EQUAL(fixture.core.close_file(fixture.number), -EBADF);
}

void test_nonsense_is_refused_as_a_whole() {
  Fixture fixture;
  uint8_t byte = 0;
  const auto address = reinterpret_cast<uintptr_t>(&byte);
  const swapio_request good = {SWAPIO_OP_WRITE, fixture.number, address, 1, 0};
  const swapio_request bad[] = {{9, fixture.number, address, 1, 0},
                                {SWAPIO_OP_READ, 12345, address, 1, 0},
                                {SWAPIO_OP_READ, fixture.number, 0, 1, 0},
                                {SWAPIO_OP_READ, fixture.number, address, UINT64_MAX, 1},
                                {SWAPIO_OP_READ, fixture.number, address, 1, UINT64_MAX}};
  for (const swapio_request& request : bad) {
    const swapio_request both[] = {good, request};
    CHECK(fixture.core.submit(50, both, 2) < 0);
    CHECK(!fixture.core.knows(50));
  }
  CHECK(fixture.file.bytes.empty());
}

void test_empty_batches_and_empty_requests_complete_at_once() {
  Fixture fixture;
  CHECK_EQUAL(fixture.core.submit(1, nullptr, 0), 1);
  fixture.next_id = 2;
  fixture.submit(SWAPIO_OP_READ, nullptr, 0, 77);
  CHECK_EQUAL(fixture.completion().transferred, 0);
  CHECK_EQUAL(fixture.completion().failed_index, -1);
  CHECK(fixture.core.wait_idle(0));
}

void test_completions_stay_until_they_are_released() {
  Fixture fixture;
  uint8_t* memory = fixture.pages(kPageBytes);
  const uint64_t id = fixture.submit(SWAPIO_OP_WRITE, memory, kPageBytes, 0);
  CHECK(!fixture.core.wait(id, 0));
  fixture.backend->run();
  CHECK(fixture.core.wait(id, 0));
  swapio_completion seen = {};
  CHECK_EQUAL(fixture.core.peek(&seen, 1), 1);
  CHECK_EQUAL(fixture.core.peek(&seen, 1), 1);
  CHECK(fixture.core.knows(id));
  const swapio_request again = {SWAPIO_OP_FSYNC, fixture.number, 0, 0, 0};
  CHECK_EQUAL(fixture.core.submit(id, &again, 1), -EEXIST);
  fixture.core.release(id);
  fixture.core.release(id);
  CHECK(!fixture.core.knows(id));
  CHECK_EQUAL(fixture.core.peek(&seen, 1), 0);
}

void test_stop_waits_for_what_is_in_flight() {
  Fixture fixture;
  uint8_t* memory = fixture.pages(kPageBytes);
  fixture.submit(SWAPIO_OP_WRITE, memory, kPageBytes, 0);
  fixture.backend->take_all();
  CHECK(!fixture.core.stop(0));
  const swapio_request request = {SWAPIO_OP_FSYNC, fixture.number, 0, 0, 0};
  CHECK_EQUAL(fixture.core.submit(50, &request, 1), -ESHUTDOWN);
  fixture.backend->run();
  CHECK(fixture.core.stop(0));
}

void test_registered_memory_is_named_in_transfers() {
  Fixture fixture;
  uint8_t* memory = fixture.pages(4 * kPageBytes);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  CHECK_EQUAL(fixture.core.register_memory(address + kPageBytes, 2 * kPageBytes), 1);
  fixture.submit(SWAPIO_OP_WRITE, memory + kPageBytes, 2 * kPageBytes, 0);
  fixture.submit(SWAPIO_OP_WRITE, memory + 2 * kPageBytes, 2 * kPageBytes, 4 * kPageBytes);
  fixture.submit(SWAPIO_OP_WRITE, memory, kPageBytes, 8 * kPageBytes);
  fixture.backend->take_all();
  CHECK_EQUAL(fixture.backend->held[0].buffer_slot, 0);
  CHECK_EQUAL(fixture.backend->held[1].buffer_slot, -1);
  CHECK_EQUAL(fixture.backend->held[2].buffer_slot, -1);
  CHECK_EQUAL(fixture.core.unregister_memory(address + kPageBytes), 1);
  CHECK_EQUAL(fixture.core.unregister_memory(address + kPageBytes), -ENOENT);
}

// Sizes and offsets above 4 GiB: nothing is touched, only counted.
void test_transfers_of_any_size() {
  constexpr uint64_t kGiga = 1 << 30;
  for (const uint64_t nbytes : {2 * kGiga + 4, 4 * kGiga + 8, 40 * kGiga - 1}) {
    Fixture fixture(4, 1, {}, SWAPIO_DIRECT_AUTO, kGiga);
    fixture.file.has_no_memory = true;
    uint64_t total = 0;
    fixture.backend->on_result = [&](const Transfer& transfer, int64_t result) {
      CHECK(transfer.nbytes <= kGiga);
      CHECK_EQUAL(reinterpret_cast<uintptr_t>(transfer.address) - kPageBytes,
                  transfer.offset - 7 * kGiga);
      total += static_cast<uint64_t>(result);
    };
    fixture.submit(SWAPIO_OP_READ, reinterpret_cast<void*>(kPageBytes), nbytes, 7 * kGiga);
    fixture.backend->run();
    const swapio_completion done = fixture.completion();
    CHECK_EQUAL(done.failed_index, -1);
    CHECK_EQUAL(done.transferred, nbytes);
    CHECK_EQUAL(total, nbytes);
  }
}

// Wherever memory runs out, the batch is refused as a whole: it holds nothing up and is not done.
void test_a_batch_that_memory_is_too_short_for_leaves_nothing() {
  for (int limit = 0;; ++limit) {
    Fixture fixture;
    uint8_t* memory = fixture.pages(8 * kPageBytes);
    memset(memory, 1, 8 * kPageBytes);
    fixture.submit(SWAPIO_OP_WRITE, memory, 2 * kPageBytes, 0);
    fixture.submit(SWAPIO_OP_READ, memory + 2 * kPageBytes, kPageBytes, kPageBytes);
    uint8_t* source = fixture.pages(4 * kPageBytes);
    memset(source, 2, 4 * kPageBytes);
    std::vector<swapio_request> requests;
    for (uint64_t page = 0; page < 4; ++page) {
      const auto address = reinterpret_cast<uintptr_t>(source + page * kPageBytes);
      requests.push_back({SWAPIO_OP_WRITE, fixture.number, address, kPageBytes, page * kPageBytes});
      requests.push_back({SWAPIO_OP_READ, fixture.number,
                          reinterpret_cast<uintptr_t>(memory + 4 * kPageBytes), kPageBytes,
                          page * kPageBytes});
    }
    requests.push_back({SWAPIO_OP_READ, fixture.number, 0, 0, 0});
    requests.push_back({SWAPIO_OP_FSYNC, fixture.number, 0, 0, 0});
    const auto num_requests = static_cast<uint32_t>(requests.size());
    bool refused = false;
    num_allocations_left = limit;
    try {
      CHECK(fixture.core.submit(100, requests.data(), num_requests) >= 0);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    num_allocations_left = -1;
    CHECK_EQUAL(fixture.core.knows(100), !refused);
    fixture.backend->run();
    CHECK_EQUAL(fixture.file.bytes[0], refused ? 1 : 2);
    for (uint64_t id = 1; id <= 2; ++id) CHECK_EQUAL(fixture.completion().failed_index, -1);
    if (refused) CHECK(fixture.core.submit(100, requests.data(), num_requests) >= 0);
    fixture.backend->run();
    const swapio_completion done = fixture.completion();
    CHECK_EQUAL(done.id, 100);
    CHECK_EQUAL(done.failed_index, -1);
    CHECK_EQUAL(done.transferred, 8 * kPageBytes);
    CHECK_EQUAL(fixture.file.bytes[4 * kPageBytes - 1], 2);
    CHECK_EQUAL(fixture.core.close_file(fixture.number), 0);
    CHECK(fixture.core.wait_closed(fixture.number, 0));
    if (!refused) {
      CHECK(limit > 20);
      return;
    }
  }
}

#define TEST(name) {#name, name}

const std::vector<NamedTest> kTests = {
    TEST(test_round_trips_at_any_offset_length_and_address),
    TEST(test_overlapping_requests_keep_their_order),
    TEST(test_requests_that_do_not_overlap_run_together),
    TEST(test_a_sync_waits_for_earlier_writes_and_holds_up_nothing),
    TEST(test_in_flight_never_exceeds_the_depth),
    TEST(test_reads_and_writes_take_turns),
    TEST(test_a_read_that_ends_early_is_an_error_with_the_bytes_that_came),
    TEST(test_a_full_disk_is_an_error_of_the_write),
    TEST(test_one_bad_request_of_a_batch_leaves_the_others_and_the_next_batch_alone),
    TEST(test_late_refusal_of_direct_io_falls_back_once),
    TEST(test_late_refusal_is_an_error_where_direct_io_is_required),
    TEST(test_endless_again_becomes_an_error),
    TEST(test_buffered_transfers_keep_the_page_cache_small),
    TEST(test_a_closed_file_ends_with_its_last_transfer),
    TEST(test_nonsense_is_refused_as_a_whole),
    TEST(test_empty_batches_and_empty_requests_complete_at_once),
    TEST(test_completions_stay_until_they_are_released),
    TEST(test_stop_waits_for_what_is_in_flight),
    TEST(test_registered_memory_is_named_in_transfers),
    TEST(test_transfers_of_any_size),
    TEST(test_a_batch_that_memory_is_too_short_for_leaves_nothing),
};

}  // namespace
}  // namespace swapio

int main(int argc, char** argv) { return swapio::run_tests(swapio::kTests, argc, argv); }
