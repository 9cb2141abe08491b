// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <stdexcept>

#include "cpu.h"

namespace swapio {

namespace scalar {
void fill_table(KernelTable& table);
}
#if defined(SWAPIO_HAVE_X86)
namespace avx2 {
void fill_table(KernelTable& table);
}
namespace avx512 {
void fill_table(KernelTable& table);
}
#endif
#if defined(SWAPIO_HAVE_NEON)
namespace neon {
void fill_table(KernelTable& table);
}
#endif

#if defined(SWAPIO_HAVE_XXH3)
extern "C" uint64_t swapio_xxh3_generic(const void* data, size_t nbytes);
#if defined(SWAPIO_HAVE_X86)
extern "C" uint64_t swapio_xxh3_avx2(const void* data, size_t nbytes);
extern "C" uint64_t swapio_xxh3_avx512(const void* data, size_t nbytes);
#endif
#endif

namespace {

#if defined(SWAPIO_HAVE_XXH3)
constexpr HashFn kHashGeneric = swapio_xxh3_generic;
#if defined(SWAPIO_HAVE_X86)
constexpr HashFn kHashAvx2 = swapio_xxh3_avx2, kHashAvx512 = swapio_xxh3_avx512;
#endif
#else
constexpr HashFn kHashGeneric = nullptr;
#if defined(SWAPIO_HAVE_X86)
constexpr HashFn kHashAvx2 = nullptr, kHashAvx512 = nullptr;
#endif
#endif

std::vector<Level> make_levels() {
  std::vector<Level> levels;
  const auto append = [&levels](const char* name, void (*fill)(KernelTable&), HashFn hash) {
    levels.push_back(Level{name, KernelTable{}, hash});
    fill(levels.back().table);
  };
  append("scalar", scalar::fill_table, kHashGeneric);
#if defined(SWAPIO_HAVE_X86)
  const X86Features features = detect_x86();
  if (features.avx2) append("avx2", avx2::fill_table, kHashAvx2);
  if (features.avx512) append("avx512", avx512::fill_table, kHashAvx512);
#elif defined(SWAPIO_HAVE_NEON)
  append("neon", neon::fill_table, kHashGeneric);  // every AArch64 processor has it
#endif
  return levels;
}

const std::vector<Level>& levels() {
  static const std::vector<Level> all = make_levels();
  return all;
}

std::atomic<const Level*> g_selected{nullptr};

const Level& find_level(const std::string& name, const std::string& source) {
  std::string names;
  for (const Level& level : levels()) {
    if (name == level.name) return level;
    names += names.empty() ? level.name : std::string(", ") + level.name;
  }
  throw std::invalid_argument(source + " asks for the SIMD level '" + name +
                              "', which this processor, operating system or build does not "
                              "have; available here: " +
                              names);
}

}  // namespace

const Level& current_level() {
  const Level* selected = g_selected.load(std::memory_order_acquire);
  if (selected == nullptr) {
    const char* wanted = std::getenv("SWAPIO_SIMD");
    const bool automatic = wanted == nullptr || *wanted == '\0' || std::string(wanted) == "auto";
    selected = automatic ? &levels().back() : &find_level(wanted, "SWAPIO_SIMD");
    g_selected.store(selected, std::memory_order_release);
  }
  return *selected;
}

void select_level(const std::string& name) {
  const Level* level = name == "auto" ? &levels().back() : &find_level(name, "set_simd_level");
  g_selected.store(level, std::memory_order_release);
}

std::vector<std::string> supported_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) names.emplace_back(level.name);
  return names;
}

}  // namespace swapio
