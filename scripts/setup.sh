#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up development on a fresh Debian or Ubuntu machine: `setup.sh env` makes the virtual
# environment with pinned tools, `setup.sh build` builds the package into it, `setup.sh
# integrations` adds the trainers that the examples use. Re-running is cheap.
#
#   VENV    where the environment goes (default .venv)
#   PYTHON  interpreter to use (default: the first of python3, python3.13, .12, .11 that is >= 3.11)
#   TORCH   requirement for torch (default: the tested CPU build)
#   CI      set: compiler warnings are errors
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
TORCH_VERSION=2.13.0
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null &&
       "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 or later found; install one (apt-get install python3 python3-venv python3-dev) or set PYTHON=/path/to/python3"
}

has_header() { echo "#include <$1>" | g++ -x c++ -fsyntax-only - 2>/dev/null; }
has_python_headers() {
  "$1" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())'
}

# Prints the Debian packages that are missing, required ones and optional ones alike.
missing_packages() {
  local python=$1
  command -v g++ >/dev/null || echo g++
  command -v pkg-config >/dev/null || echo pkg-config
  "$python" -c 'import ensurepip' 2>/dev/null || echo python3-venv
  has_python_headers "$python" || echo python3-dev
  has_header liburing.h || echo liburing-dev
  has_header xxhash.h || echo libxxhash-dev
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_system_packages() {
  local packages
  packages=$(missing_packages "$1" | tr '\n' ' ')
  [ -n "$packages" ] || return 0
  if ! command -v apt-get >/dev/null; then
    say "missing: $packages(no apt-get here; install their equivalents yourself)"
  elif [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    say "missing: $packages(no root and no passwordless sudo; going on without)"
  else
    say "installing $packages"
    as_root apt-get update -qq >&2 || say "apt-get update failed; trying with the lists at hand"
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 \
      $packages >&2 || say "apt-get could not install $packages; going on"
  fi
}

check_tools() {
  local python=$1 need=""
  command -v g++ >/dev/null || need="$need g++"
  "$python" -c 'import ensurepip' 2>/dev/null || need="$need python3-venv"
  has_python_headers "$python" || need="$need python3-dev"
  [ -z "$need" ] || die "cannot build without:$need. Run: apt-get install$need"
  has_header liburing.h ||
    say "liburing-dev is missing: swapio is built with its thread engine only (apt-get install liburing-dev, then make clean setup)"
  has_header xxhash.h ||
    say "libxxhash-dev is missing: checksums use the slower xxhash wheel (apt-get install libxxhash-dev, then make clean setup)"
}

# The local version label "+cpu" cannot match a CUDA build, whatever the index prefers. PyPI's
# plain aarch64 wheels are CPU builds, so there the bare pin is right.
install_torch() {
  local pip="$VENV/bin/python -m pip"
  if [ -n "${TORCH:-}" ]; then
    $pip install -q "$TORCH"
  elif [ "$(uname -m)" != x86_64 ]; then
    $pip install -q "torch==$TORCH_VERSION"
  elif ! $pip install -q "torch==$TORCH_VERSION+cpu" 2>/dev/null; then
    say "the configured index has no CPU build of torch; asking PyTorch's own index"
    $pip install -q "torch==$TORCH_VERSION+cpu" --extra-index-url "$TORCH_CPU_INDEX" ||
      die "no CPU build of torch $TORCH_VERSION found; to take any build that pip prefers (CUDA, several GB): make setup TORCH=torch==$TORCH_VERSION"
  fi
}

setup_env() {
  local python
  python=$(find_python)
  install_system_packages "$python"
  check_tools "$python"
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
  say "installing pinned Python packages into $VENV"
  "$VENV/bin/python" -m pip install -q --upgrade pip
  install_torch
  "$VENV/bin/python" -m pip install -q -r requirements-dev.txt
  touch "$VENV/.ready"
}

build_package() {
  local options=(-C build-dir=build/dev)
  [ -z "${CI:-}" ] || options+=(-C cmake.define.SWAPIO_WERROR=ON)
  say "building swapio (editable)"
  PATH="$PWD/$VENV/bin:$PATH" "$VENV/bin/python" -m pip install -q --no-build-isolation --no-deps \
    -e . "${options[@]}" || die "the build failed; the first compiler error is above"
  touch "$VENV/.built"
}

# torch stays as it is: all of them accept the tested version.
install_integrations() {
  local version
  version=$("$VENV/bin/python" -c 'import torch; print(torch.__version__)')
  say "installing trainers for the examples (about 300 MB)"
  DS_BUILD_OPS=0 "$VENV/bin/python" -m pip install -q -r requirements-integrations.txt \
    "torch==$version" || die "the trainers could not be installed"
  touch "$VENV/.integrations"
}

case "${1:-env}" in
  env) setup_env ;;
  build) build_package ;;
  integrations) install_integrations ;;
  *) die "unknown step '$1' (env, build or integrations)" ;;
esac
