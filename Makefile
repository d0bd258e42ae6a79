# Every chore is one command.  `make` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# PyTorch's CPU build, 200 MB, for the tests that compare with PyTorch.  `+cpu` is in its name, so that pip never
# takes the build for GPUs, of several GB, in its place.  `make test TORCH=` does without.
TORCH  ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help demo torch test test-gpu lint types update-data goldens tuned bench bench-gpu clean

help:  ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# The project's own environment.  Without a C++ compiler the CPU run uses one from a wheel.
$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attngen needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	@command -v g++ clang++ c++ >/dev/null || $(BIN)/pip install --quiet '.[cpu-cc]'
	@touch $@

demo: $(VENV)/ready  ## From a mask in a text file to CUDA, run and proved on this machine
	$(BIN)/attngen explain examples/gemma2_local.attn
	$(BIN)/attngen compile examples/gemma2_local.attn --arch sm_80,sm_90a -o build/demo
	$(BIN)/attngen run examples/gemma2_local.attn --device cpu

# Nothing depends on it: without a network, or a wheel for this machine, those tests are skipped.
torch: $(VENV)/ready
	@$(BIN)/python -c 'import sys; from importlib.util import find_spec as f; sys.exit(not (f("torch") and f("attn_gym") and f("transformers")))' \
	 || { test -n '$(TORCH)' && echo 'installing $(TORCH) for the tests that compare with PyTorch (make test TORCH= does without)' \
	  && $(BIN)/pip install --quiet --no-compile --no-deps --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) '$(TORCH)' 2>$(VENV)/torch.log \
	  && $(BIN)/pip install --quiet --no-compile '$(TORCH)' --group flex 2>>$(VENV)/torch.log; } \
	 || echo 'the tests that compare with PyTorch will be skipped: no $(or $(TORCH),PyTorch) here'

test: $(VENV)/ready lint types torch  ## Everything that needs no GPU
	$(BIN)/pytest -n auto

test-gpu: $(VENV)/ready  ## What needs a GPU (skips with a reason where there is none)
	$(BIN)/pytest tests/gpu tests/pytorch -m gpu

lint: $(VENV)/ready  ## Style and layering
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/ready  ## mypy --strict
	$(BIN)/mypy

update-data: $(VENV)/ready  ## Rewrite expected texts; read the diff
	$(BIN)/pytest -n auto --update-data

goldens: $(VENV)/ready  ## Regenerate generated/
	$(BIN)/python -m tests.goldens

tuned: $(VENV)/ready  ## Take measured records into tuned/, stale ones out: make tuned RECORDS=FILE
	$(BIN)/attngen cache import $(RECORDS) --into tuned
	$(BIN)/attngen cache prune tuned --keep 4 --stale

bench: $(VENV)/ready  ## Start-up and compile times, as a table
	$(BIN)/python -m benchmarks.startup

bench-gpu: $(VENV)/ready  ## attngen beside every installed peer (needs a GPU and PyTorch)
	$(BIN)/python -m benchmarks.attention

clean:  ## Remove what these commands made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
