#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs benchmarks in turn on an otherwise quiet machine, keeps the JSON line that each ends with in
# benchmarks/results/, and writes README's tables from them.
#   bench.sh [--dir DIR] [NAME...]     DIR: folder on the device (default build/bench)
#                                      NAME: of benchmarks/bench_NAME.py (default engine kernels step)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
folder=build/bench
if [ "${1:-}" = --dir ]; then folder=$2; shift 2; fi
mkdir -p "$folder" benchmarks/results
names=("$@")
# The others need a GPU, several ranks or minutes, and say so in their docstrings.
[ ${#names[@]} != 0 ] || names=(engine kernels step)
for name in "${names[@]}"; do
  script=benchmarks/bench_$name.py
  options=() where=()
  if "$VENV/bin/python" "$script" --help | grep -q -e '--dir'; then
    options=(--dir "$folder") where=(--storage "$folder")
  fi
  printf '\n== %s\n' "$name"
  "$VENV/bin/python" "$script" "${options[@]}" | tee /dev/stderr | tail -1 > "build/bench-$name.json"
  "$VENV/bin/python" benchmarks/make_readme_tables.py --add "$name" "build/bench-$name.json" "${where[@]}"
done
