# SPDX-License-Identifier: Apache-2.0
# The commands that README and .ci/run call. Each sets up what it needs on first use, in .venv.

VENV ?= .venv
BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find csrc -type f)
PYTEST := $(BIN)/python -m pytest
# More than the cores of a small machine: for a third of their time workers only wait.
WORKERS ?= 3
export VENV

.PHONY: help setup demo test test-fast test-fallbacks test-integrations native lint format types \
	soak bench sanitize test-neon wheel docs clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

$(VENV)/.ready: requirements-dev.txt scripts/setup.sh
	bash scripts/setup.sh env

$(VENV)/.built: $(VENV)/.ready pyproject.toml $(NATIVE_SOURCES)
	bash scripts/setup.sh build

setup: $(VENV)/.built ## virtual environment, system packages where allowed, the package

demo: $(VENV)/.built ## train a small GPT with its optimizer state in RAM and on storage (ARGS=...)
	$(BIN)/swapio demo $(ARGS)

test: test-fast native test-fallbacks ## all tests but the minutes-long ones

test-fast: $(VENV)/.built ## the Python tests, WORKERS=3 processes at a time (0: in one process)
	$(PYTEST) -n $(WORKERS) --dist worksteal $(ARGS)

$(VENV)/.integrations: $(VENV)/.built requirements-integrations.txt
	bash scripts/setup.sh integrations

# What is in tests/integrations besides needs none of these packages, nor do the two examples that
# are left out: `make test` runs them.
test-integrations: $(VENV)/.integrations ## examples with accelerate, transformers, Lightning, DeepSpeed
	$(PYTEST) tests/integrations/test_examples.py tests/integrations/test_deepspeed_training.py \
		-k "not fsdp2 and not custom_engine" -n 2 --dist worksteal $(ARGS)

test-fallbacks: $(VENV)/.built ## engine tests: io_uring denied, tiny memlock, built without liburing
	bash scripts/test_fallbacks.sh

native: $(VENV)/.built ## the C++ test programs, also under the address and thread sanitizers
	bash scripts/native_tests.sh

lint: $(VENV)/.ready ## format and lint checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	find csrc -name '*.cpp' -o -name '*.h' | grep -v aio.cdef.h | \
		xargs -r $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.ready ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.h' | grep -v aio.cdef.h | xargs -r $(BIN)/clang-format -i

types: $(VENV)/.ready ## mypy strict, against an installed wheel
	bash scripts/check_types.sh

soak: $(VENV)/.built ## the minutes-long tests: full matrices, crash points, stress
	$(PYTEST) -m slow --timeout 1800 $(ARGS)

bench: $(VENV)/.built ## engine against fio, kernels against their ceiling, steps (ARGS="--dir DIR")
	bash scripts/bench.sh $(ARGS)

test-neon: $(VENV)/.ready ## the kernels cross-compiled for aarch64, NEON against scalar under qemu
	bash scripts/test_neon.sh

sanitize: $(VENV)/.ready ## the native-heavy Python tests under AddressSanitizer and UBSan
	bash scripts/sanitize.sh

wheel: $(VENV)/.ready ## a wheel and an sdist in dist/, tested in a clean environment
	bash scripts/build_wheel.sh
	bash scripts/check_wheel.sh

docs: $(VENV)/.built ## the documentation site in build/site
	bash scripts/build_docs.sh

clean: ## remove what the build made, not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache $(VENV)/.built
