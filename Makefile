# Every target makes its environment first: .venv, with the versions of constraints.txt.
# PYTHON names the interpreter to make it with: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help run test check format soak faults clean

help:
	@echo "make run      train the quickstart: a small model, about a minute on two CPU cores"
	@echo "make test     all tests"
	@echo "make check    formatting, lint, types, import rules"
	@echo "make format   let ruff format and fix what it can"
	@echo "make soak     the long tests, and every property with twenty times the cases"
	@echo "make faults   write docs/faults.md from the marks of the tests"
	@echo "make clean    remove .venv and caches; runs/ stays"

# The stamp is newer than what the environment was made from. A half-made environment has none.
.venv/stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old; Python 3.11 or newer is needed: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "$(PYTHON) cannot make environments; install its venv package" \
	       "(on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[trainer,dev]'
	@touch $@

.PHONY: .venv
.venv: .venv/stamp

# Threads that wait for each other in a busy loop crawl on a core that somebody else uses, too; after
# so short a loop they sleep. It changes no bit.
run: .venv
	GOMP_SPINCOUNT=1000 $(BIN)/supervisor start --config configs/quickstart.toml

# Most tests wait for processes more than they compute: three at a time fit on two cores.
test: .venv
	$(BIN)/pytest -n 3 --dist loadfile

check: .venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/test_layout.py

format: .venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

soak: .venv
	SOAK=1 $(BIN)/pytest --timeout=7200 -m "soak or hypothesis"

faults: .venv
	@mkdir -p docs
	$(BIN)/pytest --collect-only -q --fault-table=docs/faults.md > /dev/null

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find supervisor trainer tests -name __pycache__ -prune -exec rm -rf {} +
