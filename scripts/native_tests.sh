#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the C++ test programs under AddressSanitizer with leak checking and UBSan, and under
# ThreadSanitizer. The flags are those of sanitize.sh, so that ccache compiles each file once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
PATH="$PWD/$VENV/bin:$PATH"
pybind11_dir=$("$VENV/bin/python" -m pybind11 --cmakedir)
# As scikit-build-core names them: to ccache c++ is another compiler than g++.
export CC=${CC:-gcc} CXX=${CXX:-g++}
flags="-O1 -g1 -DNDEBUG"
for variant in sanitize tsan; do
  options=(-DSWAPIO_NATIVE_TESTS=ON -DSWAPIO_WERROR=ON -DCMAKE_BUILD_TYPE=None
    "-DCMAKE_CXX_FLAGS=$flags" "-DCMAKE_C_FLAGS=$flags"
    "-Dpybind11_DIR=$pybind11_dir" "-DPython_EXECUTABLE=$PWD/$VENV/bin/python")
  if [ "$variant" = tsan ]; then options+=(-DSWAPIO_TSAN=ON); else options+=(-DSWAPIO_SANITIZE=ON); fi
  printf '\n== native tests, %s\n' "$variant"
  cmake -S csrc -B "build/native-$variant" -G Ninja "${options[@]}" >/dev/null
  cmake --build "build/native-$variant" --target swapio_native_tests
  ctest --test-dir "build/native-$variant" --output-on-failure --no-tests=ignore
done
