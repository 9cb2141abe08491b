// SPDX-License-Identifier: Apache-2.0
// Square sums, conversions, copies, hashes, and split/join over lists of runs.
#include <cstring>
#include <stdexcept>

#include "cpu.h"
#include "dispatch.h"
#include "spans.h"
#include "ties.h"
#include "tiles.h"

namespace swapio {
namespace {

constexpr int64_t kTileNumel = 1 << 15;
// Part of the definition of a square sum: each run is summed in tiles of this size, and the tiles
// are added in order.
constexpr int64_t kSumTileNumel = 1 << 14;
constexpr int64_t kCopyTileBytes = 1 << 18;

int64_t element_bytes(Dtype dtype) { return dtype == kFp32 ? 4 : 2; }

uint64_t offset(int64_t first, int64_t bytes) { return static_cast<uint64_t>(first * bytes); }

}  // namespace

std::vector<double> square_sums(const Run* runs, int64_t num_runs, Dtype dtype, int max_threads) {
  const FloatEnvironment environment;  // the tiles' sums are added here, on the caller's thread
  const SquareSumFn sum = current_level().table.square_sum[dtype];
  std::vector<int64_t> first_tile{0};
  for (int64_t i = 0; i < num_runs; i++) {
    first_tile.push_back(first_tile.back() + (runs[i].numel + kSumTileNumel - 1) / kSumTileNumel);
  }
  std::vector<double> partial(static_cast<size_t>(first_tile.back()));
  const auto sum_tile = [&](int64_t tile) {
    const auto after = std::upper_bound(first_tile.begin(), first_tile.end(), tile);
    const int64_t index = after - first_tile.begin() - 1;
    const int64_t first = (tile - first_tile[static_cast<size_t>(index)]) * kSumTileNumel;
    const int64_t numel = std::min(kSumTileNumel, runs[index].numel - first);
    const uint64_t address = runs[index].from + offset(first, element_bytes(dtype));
    partial[static_cast<size_t>(tile)] = sum(pointer(address), numel);
  };
  // Several tiles an item, or a list of many small runs would be all hand-over.
  const int64_t num_tiles = first_tile.back(), tiles_per_item = 8;
  const int64_t num_items = (num_tiles + tiles_per_item - 1) / tiles_per_item;
  for_each_item(num_items, max_threads, [&](int64_t item, int) {
    const int64_t end = std::min((item + 1) * tiles_per_item, num_tiles);
    for (int64_t tile = item * tiles_per_item; tile < end; tile++) sum_tile(tile);
  });
  std::vector<double> sums(static_cast<size_t>(num_runs), 0.0);
  for (size_t i = 0; i < sums.size(); i++) {
    for (int64_t tile = first_tile[i]; tile < first_tile[i + 1]; tile++) {
      sums[i] += partial[static_cast<size_t>(tile)];
    }
  }
  return sums;
}

void convert_spans(const Run* runs, int64_t num_runs, Dtype from, Dtype to, int max_threads) {
  const ConvertFn convert = current_level().table.convert[from][to];
  if (convert == nullptr) throw std::invalid_argument("convert_spans: the two dtypes are equal");
  const Tiles tiles(runs, num_runs, kTileNumel);
  for_each_item(tiles.num_tiles(), max_threads, [&](int64_t tile, int) {
    tiles.visit(tile, [&](int64_t index, int64_t first, int64_t numel) {
      convert(pointer(runs[index].from + offset(first, element_bytes(from))),
              mutable_pointer(runs[index].to + offset(first, element_bytes(to))), numel);
    });
  });
}

void copy_spans(const Run* runs, int64_t num_runs, int max_threads) {
  const Tiles tiles(runs, num_runs, kCopyTileBytes);
  for_each_item(tiles.num_tiles(), max_threads, [&](int64_t tile, int) {
    tiles.visit(tile, [&](int64_t index, int64_t first, int64_t nbytes) {
      std::memcpy(mutable_pointer(runs[index].to + offset(first, 1)),
                  pointer(runs[index].from + offset(first, 1)), static_cast<size_t>(nbytes));
    });
  });
}

void fill_spans(const Run* runs, int64_t num_runs, int value, int max_threads) {
  const Tiles tiles(runs, num_runs, kCopyTileBytes);
  for_each_item(tiles.num_tiles(), max_threads, [&](int64_t tile, int) {
    tiles.visit(tile, [&](int64_t index, int64_t first, int64_t nbytes) {
      std::memset(mutable_pointer(runs[index].to + offset(first, 1)), value,
                  static_cast<size_t>(nbytes));
    });
  });
}

bool hash_spans(const Run* runs, int64_t num_runs, uint64_t* hashes, int max_threads) {
  const HashFn hash = current_level().hash;
  if (hash == nullptr) return false;
  for_each_item(num_runs, max_threads, [&](int64_t index, int) {
    hashes[index] = hash(pointer(runs[index].from), static_cast<size_t>(runs[index].numel));
  });
  return true;
}

TieList split_spans(const SplitRun* runs, int64_t num_runs, int max_threads) {
  const SplitFn split = current_level().table.split;
  const Tiles tiles(runs, num_runs, kTileNumel);
  TieCollector collector(nullptr, 0, kTileNumel);
  for_each_item(tiles.num_tiles(), max_threads, [&](int64_t tile, int) {
    tiles.visit(tile, [&](int64_t index, int64_t first, int64_t numel) {
      const SplitRun& run = runs[index];
      collector.collect([&](Ties& ties) {
        split(pointer(run.master + offset(first, 4)), mutable_pointer(run.high + offset(first, 2)),
              mutable_pointer(run.low + offset(first, 2)), numel,
              static_cast<uint64_t>(run.position + first), ties);
      });
    });
  });
  return collector.sorted();
}

void join_spans(const SplitRun* runs, int64_t num_runs, const uint32_t* ties, int64_t num_ties,
                int max_threads) {
  const JoinFn join = current_level().table.join;
  const Tiles tiles(runs, num_runs, kTileNumel);
  for_each_item(tiles.num_tiles(), max_threads, [&](int64_t tile, int) {
    Ties list{ties, num_ties, nullptr, 0};
    tiles.visit(tile, [&](int64_t index, int64_t first, int64_t numel) {
      const SplitRun& run = runs[index];
      join(pointer(run.high + offset(first, 2)), pointer(run.low + offset(first, 2)),
           mutable_pointer(run.master + offset(first, 4)), numel,
           static_cast<uint64_t>(run.position + first), list);
    });
  });
}

}  // namespace swapio
