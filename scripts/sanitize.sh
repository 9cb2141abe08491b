#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the Python tests that exercise native code under AddressSanitizer and UBSan. Leak checking is
# off here, because CPython and torch keep memory until exit; the native programs check leaks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra tests <<< "${SANITIZE_TESTS:-tests/aio tests/buffers tests/kernels tests/swapper}"
present=()
for folder in "${tests[@]}"; do [ ! -e "$folder" ] || present+=("$folder"); done
if [ ${#present[@]} = 0 ]; then echo "no native tests"; exit 0; fi
python=$(bash scripts/variant.sh asan -C cmake.define.SWAPIO_SANITIZE=ON -C cmake.define.SWAPIO_WERROR=ON \
  -C cmake.build-type=None "-Ccmake.define.CMAKE_CXX_FLAGS=-O1 -g1 -DNDEBUG" "-Ccmake.define.CMAKE_C_FLAGS=-O1 -g1 -DNDEBUG")
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
# Tests marked `forks` go on in a forked child and are left out: the sanitizer's allocator holds its
# locks over fork, so that a child of a process with threads waits for ever at its first allocation.
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:halt_on_error=1 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONMALLOC=malloc \
  "$python" -m pytest -q -n 2 --dist worksteal --timeout 600 -m "not slow and not forks" "$@" "${present[@]}"
