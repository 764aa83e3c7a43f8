# make demo: the demonstration.  make test: everything.  Each sets up what it needs (system packages too, when root).
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
N ?= 1000
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint unit crash-enumerate vm crash bench venv packages manifests clean

packages:
	@tools/system_packages.sh

venv: packages
	@tools/venv.sh $(VENV) dev,engine

demo: venv
	@$(VENV)/bin/kvtier demo $(DEMO_ARGS)

# Everything that CI runs. What a machine lacks is a named skip for a user, and a failure in CI.
test: venv lint
	tools/run_tests.sh

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m kvtier_api.generate --check

# Exhaustive: every kill point with every injected error, and N power cuts at random.
crash: venv
	KVTIER_EXHAUSTIVE=1 KVTIER_CUTS=$(N) $(PYTEST) tests/crash tests/vm

bench: venv
	$(PY) -m bench

manifests: venv
	$(PY) -m kvtier_api.generate

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
