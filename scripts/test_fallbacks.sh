#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that depend on the engine where it has to fall back: io_uring denied (as containers
# do), a tiny memory-lock limit, and a build without liburing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
read -ra all <<< "${ENGINE_TESTS:-tests/aio tests/swapper/test_lifecycle.py}"
# Where only the thread engine is left, the rest of tests/aio would repeat what every run of the
# suite does with that engine.
read -ra some <<< "${ENGINE_TESTS:-tests/aio/test_round_trip.py tests/aio/test_fallbacks.py tests/swapper/test_lifecycle.py}"

parallel=(-n 2 --dist worksteal)

say() { printf '\n== %s\n' "$*"; }

say "io_uring denied with EPERM"
"$VENV/bin/python" scripts/deny_io_uring.py EPERM "$VENV/bin/python" -m pytest -q "${parallel[@]}" "${some[@]}"

# Root ignores the limit, so the capability has to go too. One test at a time: all rings of a user
# count against it.
drop=()
[ "$(id -u)" != 0 ] || drop=(setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock)
say "memory-lock limit of 64 KiB"
prlimit --memlock=65536:65536 "${drop[@]}" "$VENV/bin/python" -m pytest -q "${all[@]}"

say "built without liburing"
python=$(bash scripts/variant.sh no-uring -C cmake.define.SWAPIO_URING=OFF)
"$python" -m pytest -q "${parallel[@]}" "${some[@]}"
