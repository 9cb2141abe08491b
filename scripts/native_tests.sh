#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the C++ test programs three times: plain, under AddressSanitizer with leak checking
# and UBSan, and under ThreadSanitizer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
PATH="$PWD/$VENV/bin:$PATH"
pybind11_dir=$("$VENV/bin/python" -m pybind11 --cmakedir)
for variant in plain sanitize tsan; do
  options=(-DSWAPIO_NATIVE_TESTS=ON -DSWAPIO_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
    "-Dpybind11_DIR=$pybind11_dir" "-DPython_EXECUTABLE=$PWD/$VENV/bin/python")
  [ "$variant" != sanitize ] || options+=(-DSWAPIO_SANITIZE=ON)
  [ "$variant" != tsan ] || options+=(-DSWAPIO_TSAN=ON)
  printf '\n== native tests, %s\n' "$variant"
  cmake -S csrc -B "build/native-$variant" -G Ninja "${options[@]}" >/dev/null
  cmake --build "build/native-$variant" --target swapio_native_tests
  ctest --test-dir "build/native-$variant" --output-on-failure --no-tests=ignore
done
