/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of the async file engine. Declarations only: this file is a C header and the cffi cdef.
 *
 * Functions return 0 or a positive value on success and a negated errno on failure; errno itself is
 * never used. Every function may be called from any thread, unless it says otherwise.
 */

#define SWAPIO_OP_READ 0
#define SWAPIO_OP_WRITE 1
#define SWAPIO_OP_FSYNC 2
#define SWAPIO_OP_FDATASYNC 3

#define SWAPIO_KIND_THREADS 0
#define SWAPIO_KIND_URING 1

/* swapio_completion.flags: direct I/O was refused by the kernel at first use; the file is buffered
 * from now on. */
#define SWAPIO_FLAG_FELL_BACK 1

/* swapio_file_config.direct */
#define SWAPIO_DIRECT_OFF 0
#define SWAPIO_DIRECT_AUTO 1
#define SWAPIO_DIRECT_REQUIRED 2

typedef struct swapio_engine swapio_engine;

typedef struct {
  int32_t kind;
  uint32_t queue_depth;
  uint64_t block_bytes;
  uint32_t num_threads;
  uint32_t reserved;
} swapio_engine_config;

/* The engine owns both descriptors from the call on, also when it fails. */
typedef struct {
  int32_t fd;          /* the data descriptor: O_DIRECT unless direct is SWAPIO_DIRECT_OFF */
  int32_t buffered_fd; /* for unaligned ends; -1 when direct is SWAPIO_DIRECT_OFF */
  int32_t direct;
  uint32_t offset_alignment; /* of file offsets and lengths, a power of two */
  uint32_t memory_alignment; /* of addresses, a power of two */
  uint32_t reserved;
} swapio_file_config;

typedef struct {
  int32_t op;
  int32_t file;
  uint64_t address;
  uint64_t nbytes;
  uint64_t offset;
} swapio_request;

typedef struct {
  uint64_t id;
  uint64_t transferred;        /* bytes of all requests, when all succeeded */
  uint64_t failed_transferred; /* contiguous bytes of the failed request that were moved */
  int32_t failed_index;        /* the first request that failed, or -1 */
  int32_t error;               /* its positive errno; 0 with failed_index >= 0: it ended early */
  uint32_t flags;
  uint32_t reserved;
} swapio_completion;

typedef struct {
  uint64_t bytes_read;
  uint64_t bytes_written;
  uint64_t num_reads;
  uint64_t num_writes;
  uint64_t read_nanoseconds;
  uint64_t write_nanoseconds;
  uint64_t num_batches_in_flight;
  uint64_t num_files;
  uint64_t num_registered_files;
  uint64_t num_registered_buffers;
} swapio_stats;

/* 1 when the library was built with io_uring. */
int swapio_uring_is_built(void);
/* Creates and closes a small ring: 0, or the negated errno of the refusal. */
int swapio_uring_probe(void);

/* Fills the alignment of O_DIRECT that the file reports. 1: reported, 0: the kernel does not know
 * (alignments are 4096), negative: the call failed. Zero alignments: the file refuses direct I/O.
 */
int swapio_direct_alignment(int fd, uint32_t *offset_alignment, uint32_t *memory_alignment);

/* Returns null and sets *error to a negated errno on failure. */
swapio_engine *swapio_engine_create(const swapio_engine_config *config, int *error);
/* Asks the threads to end once nothing is queued; later submits fail with ESHUTDOWN. Never blocks.
 */
void swapio_engine_shut_down(swapio_engine *engine);
/* Shuts down, waits until nothing is in flight, and ends the threads. -ETIMEDOUT: it still runs and
 * still owns its buffers. Other calls stay legal afterwards. Not from two threads at once. */
int swapio_engine_stop(swapio_engine *engine, int timeout_ms);
/* Frees a stopped engine. One that still runs (also the copy in a forked child) is leaked. */
void swapio_engine_free(swapio_engine *engine);
/* In a forked child only: closes the child's copies of the descriptors. Takes no lock. */
void swapio_engine_abandon(swapio_engine *engine);
void swapio_engine_stats(swapio_engine *engine, swapio_stats *stats);

/* Returns the file's number. */
int swapio_file_open(swapio_engine *engine, const swapio_file_config *config);
/* Closes when the last transfer of the file has completed. Never blocks. */
int swapio_file_close(swapio_engine *engine, int file);
/* 1: the file is closed, 0: not yet. */
int swapio_file_wait_closed(swapio_engine *engine, int file, int timeout_ms);
/* 1 when transfers go past the page cache, 0 when not. */
int swapio_file_is_direct(swapio_engine *engine, int file);

/* Queues requests under one id, which the caller makes unique and increasing. Overlapping pages of
 * one file are ordered by queueing. The memory must stay valid until the completion of the id.
 * Returns how many completions wait to be released. */
int swapio_engine_submit(swapio_engine *engine, uint64_t id, const swapio_request *requests,
                         uint32_t num_requests);
/* 1: complete (or unknown), 0: the time is over. */
int swapio_engine_wait(swapio_engine *engine, uint64_t id, int timeout_ms);
/* 1: every batch that was submitted is complete, 0: the time is over. */
int swapio_engine_wait_idle(swapio_engine *engine, int timeout_ms);
/* 1 when the id is queued, in flight, or completed and not yet released. */
int swapio_engine_knows(swapio_engine *engine, uint64_t id);
/* Copies the oldest completions without removing them, and returns how many. */
int swapio_engine_peek(swapio_engine *engine, swapio_completion *completions, uint32_t capacity);
/* Forgets the oldest completions up to and including `last_id` in the order of peek. */
void swapio_engine_release(swapio_engine *engine, uint64_t last_id);

/* Registers memory with the kernel (fixed buffers). Returns the number of table entries that it
 * took, or a negated errno; transfers work without it. */
int swapio_engine_register(swapio_engine *engine, uint64_t address, uint64_t nbytes);
int swapio_engine_unregister(swapio_engine *engine, uint64_t address);
