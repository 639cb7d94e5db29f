# Choose another interpreter, place or torch build from outside, for example:
#   make demo PYTHON=python3.12 CONSTRAINTS=/dev/null PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
JOBS ?= 2
ARGS ?=

NEEDED := $(shell sed -n 's/^requires-python = ">=\(.*\)"$$/\1/p' pyproject.toml)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OFFLINE := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(OFFLINE) $(BIN)/python -m pytest

# Before anything is loaded: pip finds out late that a Python is too old.
CHECK_VERSION = import sys; sys.exit(sys.version_info < tuple(map(int, "$(NEEDED)".split("."))) and "comlrl_lightning needs Python $(NEEDED) or newer, and %s is %d.%d.%d." % ((sys.executable,) + tuple(sys.version_info[:3])))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow check format lint types bench mutants clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# pip runs again only when the project's requirements changed: once installed, nothing below needs a network.
$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS))
	@test -x $(BIN)/python || $(PYTHON) -c '$(CHECK_VERSION)' || { echo "Choose another: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c '$(CHECK_VERSION)' || { echo "Remove $(VENV), and choose another: make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV) (about a minute)"
	@$(BIN)/python -m pip install $(PIP_ARGS) --constraint $(CONSTRAINTS) --editable '.[dev]' > $(VENV)/install.log \
		|| { tail -n 20 $(VENV)/install.log; echo "pip could not install; all it wrote: $(VENV)/install.log"; exit 1; }
	@touch $(STAMP)

setup: $(STAMP) ## Make the virtual environment and install the package with its development tools

demo: $(STAMP) ## Train two agents on the embedded story model and write runs/demo
	$(OFFLINE) $(BIN)/python -m comlrl_lightning.demo $(ARGS)

test: $(STAMP) ## Run the default tests: CPU, no network
	$(PYTEST) -n $(JOBS) --dist worksteal $(ARGS)

test-slow: $(STAMP) ## Run the long tests: learning curves, resumes in other processes, several ranks
	$(PYTEST) -m slow --timeout=3000 $(ARGS)

check: lint types test ## Check format, lint and types, then run the default tests

format: $(STAMP) ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(STAMP) ## Check format and lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Check types of the package and the tests
	$(BIN)/mypy

bench: $(STAMP) ## Measure speed and memory beside comlrl: hours, or some minutes with ARGS=--quick
	$(BIN)/python benchmarks/bench_comlrl.py $(ARGS)

mutants: $(STAMP) ## Change the code in small ways and count how many changes the tests notice
	$(OFFLINE) $(BIN)/mutmut run $(ARGS)
	$(BIN)/mutmut results

clean: ## Remove what builds, tests and the demo leave behind; other runs and the virtual environment stay
	rm -rf build dist runs/demo lightning_logs wandb mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
