# Each of these does all the set-up: `make demo`, `make test`, `make test-all`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Three processes on two cores: tests of what must end also wait. One that has nothing left to do takes from the others.
PYTEST := $(BIN)/python -m pytest -n $${PIPEAL_TEST_PROCESSES:-3} --dist worksteal --durations=30
# Bytecode is kept: without it each of the processes rewrites every assertion, a third of what the quick tests take.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all slow check format docs dist bench clean

demo: $(READY)  ## train on a data set that needs no download, compare AL with backpropagation, forecast more devices
	$(BIN)/python nlpmain.py toynews transformer --mode compare

test: check  ## format, lint, types, import rules, doctests, and every law for every model: minutes
	$(PYTEST) -m "not slow"

test-all: test slow  ## the same, then what takes long: processes, kernels, every precision and number of stages

slow: $(READY)
	$(PYTEST) -m slow

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## put the code in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## the pages of docs/ as a site, in site/
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(READY)  ## sdist and, of it, wheel in dist/; the wheel is used outside the repository
	rm -rf dist
	$(BIN)/python -m build
	PYTHON=$(BIN)/python scripts/check_wheel.sh dist/*.whl

bench: $(READY)  ## some of the benchmarks in scripts/bench; each prints the machine it ran on
	$(BIN)/python scripts/bench/schedules.py
	$(BIN)/python scripts/bench/memory.py --quick
	$(BIN)/python scripts/bench/text.py transformer --data-root "$${PIPEAL_DATA:-data}"
	$(BIN)/python scripts/bench/text.py lstm --data-root "$${PIPEAL_DATA:-data}" --table ladder
	$(BIN)/python scripts/bench/vision.py defaults --data-root "$${PIPEAL_DATA:-data}"
	$(BIN)/python scripts/bench/vision.py speed --batch-sizes 128
	$(BIN)/python scripts/bench/reading.py --data-root "$${PIPEAL_DATA:-data}"
	$(BIN)/python scripts/bench/batching.py --data-root "$${PIPEAL_DATA:-data}"
	$(BIN)/python scripts/bench/training.py agnews transformer --data-root "$${PIPEAL_DATA:-data}"
	$(BIN)/python scripts/bench/grouping.py
	$(BIN)/python scripts/bench/gpu.py --quick
	$(BIN)/python scripts/bench/overhead.py transformer --data-root "$${PIPEAL_DATA:-data}"

# Modules are compiled when they are first imported: all of torch and what it brings takes a minute of one core.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "pipeal needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-compile -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
