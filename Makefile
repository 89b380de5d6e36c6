# Needs Python 3.11, make and git. The first target run builds .venv from requirements.lock.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Processes of pytest.
WORKERS ?= 2
# Options of tests/matrix.py: --ends, or --versions 5.0.0,5.24.0
MATRIX ?=

BIN := .venv/bin
INSTALLED := .venv/installed
SOURCES := $(wildcard *.py tests training benchmarks evaluation)

.PHONY: demo test test-slow test-matrix check

demo: $(INSTALLED)
	$(BIN)/python demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

test-matrix: $(INSTALLED)
	$(BIN)/python -m tests.matrix $(MATRIX)

test test-slow test-matrix: export OMP_NUM_THREADS = 1

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/python -m compileall -q $(SOURCES)

# The type checker finds `shram`, the package that tests make of the root, through the link.
$(INSTALLED): requirements.lock
	@echo "building .venv"
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	mkdir .venv/typecheck && ln -s ../.. .venv/typecheck/shram
	touch $@
