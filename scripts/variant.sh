#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a variant of the native modules beside the main one: `variant.sh NAME [pip -C options]`
# prints the interpreter of a small environment that shares .venv's packages. Each variant has its
# own build folder because options stick in CMake's cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
name=$1
shift
env=build/variants/$name
if [ ! -x "$env/bin/python" ]; then
  "$VENV/bin/python" -m venv --without-pip "$env"
  site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/_shared.pth"
fi
PATH="$PWD/$VENV/bin:$PATH" "$env/bin/python" -m pip install -q --no-build-isolation --no-deps \
  --no-warn-script-location -e . -C build-dir="build/$name" "$@" >&2
echo "$env/bin/python"
