# make run   trains a drafter for the built-in target, on whatever this machine has
# make test  the quick tests, ruff and the type checker; `make test-slow` runs the long tests too
# Set PYTHON to choose the interpreter (3.11 or newer) that .venv is made with.

PYTHON ?= python3
SCHEDULE ?= schedules/sequential_target_parallel_drafter.toml
SETUP = .venv/installed
PY = .venv/bin/python

.PHONY: run test test-slow lint

run: $(SETUP)
	$(PY) -m engine run $(SCHEDULE) $(ARGS)

test: $(SETUP) lint
	$(PY) -m pytest -q -n 2 -m "not slow" $(ARGS)

test-slow: $(SETUP) lint
	$(PY) -m pytest -q $(ARGS)

lint: $(SETUP)
	$(PY) -m ruff check --quiet .
	$(PY) -m ruff format --quiet --check .
	$(PY) -m mypy

# The stamp is written last, so that an interrupted installation is taken up again.
$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,report]'
	touch $(SETUP)
