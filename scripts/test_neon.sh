#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Cross-compiles the kernels for aarch64 and runs their native test program, NEON against scalar bit
# for bit, and the engine's core test under emulation. Needs (Debian): apt-get install
# g++-aarch64-linux-gnu qemu-user ninja-build. Emulation proves results, not speed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
PATH="$PWD/$VENV/bin:$PATH"
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$tool" >/dev/null; then
    echo "$tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user" >&2
    exit 1
  fi
done
build=build/native-aarch64
# Static, so that the emulator needs no aarch64 libraries; liburing and xxhash are the host's.
cmake -S csrc -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64 -DCMAKE_EXE_LINKER_FLAGS=-static \
  -DCMAKE_BUILD_TYPE=Release -DSWAPIO_NATIVE_TESTS=ON -DSWAPIO_WERROR=ON -DSWAPIO_URING=OFF \
  -DSWAPIO_XXHASH_INCLUDE:PATH= \
  "-Dpybind11_DIR=$("$VENV/bin/python" -m pybind11 --cmakedir)" \
  "-DPython_EXECUTABLE=$(command -v "$VENV/bin/python")" \
  "-DPython_INCLUDE_DIR=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
  >/dev/null
cmake --build "$build" --target kernels_levels_test aio_core_test
ctest --test-dir "$build" --output-on-failure -R 'kernels_levels|aio_core'
