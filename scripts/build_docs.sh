#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the documentation site into build/site. Broken links are errors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
"$VENV/bin/python" -m pip install -q mkdocs==1.6.1
"$VENV/bin/python" docs/make_configuration.py
git diff --exit-code docs/configuration.md ||
  { echo "docs/configuration.md was out of date; it is now written anew"; exit 1; }
mkdir -p build/docs
cp docs/site.yml build/docs/mkdocs.yml
"$VENV/bin/python" -m mkdocs build -q -f build/docs/mkdocs.yml
echo "build/site/index.html"
