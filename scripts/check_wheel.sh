#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs dist/*.whl into a new environment and uses it from another folder, with no compiler on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
root=$PWD
scratch=$(mktemp -d "$root/build/check-wheel.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
# auditwheel copies shared libraries that it finds into swapio.libs: liburing must be linked in.
if "$VENV/bin/python" -m zipfile -l "$root"/dist/*.whl | grep -q 'swapio\.libs/'; then
  echo "error: the wheel carries shared libraries; liburing is meant to be static"; exit 1
fi
"$VENV/bin/python" -m venv "$scratch/env"
torch=$("$VENV/bin/python" -c 'import torch; print(torch.__version__)')
# Nothing to compile with: only the environment itself is on PATH.
(
  cd "$scratch"
  export PATH="$scratch/env/bin"
  python -m pip install -q "torch==$torch" "$root"/dist/*.whl
  if python -c 'import optim' 2>/dev/null; then echo "error: a stray top-level optim"; exit 1; fi
  python "$root/scripts/smoke.py" "$scratch"
)
