# make demo: the demonstration.  make test: everything.  Each sets up what it needs (system packages too, when root).
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
N ?= 1000
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-cluster cluster-tools images test-floor bench-scale lint unit crash-enumerate crash bench venv packages manifests clean kernel

packages:
	@tools/system_packages.sh

venv: packages
	@tools/venv.sh $(VENV) dev,engine,node,operator

demo: venv
	@$(VENV)/bin/kvtier demo $(DEMO_ARGS)

# The kernel of the virtual machine whose power the tests cut.
kernel: packages
	@python3 tests/vm/fetch_kernel.py

# Everything that CI runs. What a machine lacks is a named skip for a user, and a failure in CI.
test: venv kernel lint
	tools/run_tests.sh

# Of these, the operator, the CSI service and the chart against a real control plane and a real node. Their tools take about
# 20 minutes to build on two cores, once; `make test` builds them while its other suites run.
test-cluster: venv cluster-tools
	tools/cluster_packages.sh
	$(PYTEST) -q tests/cluster tests/chart tests/node/csi/test_sanity.py

cluster-tools: venv
	$(PY) tests/cluster/build_tools.py

# A docker-archive of both images as the Dockerfile makes them, and of what the tests add: $(OUT). Debian, root.
OUT ?= images.tar
images: venv
	tools/cluster_packages.sh
	$(PY) tests/cluster/images.py $(OUT)

# The same on the oldest Kubernetes that is supported, without whole nodes and without injection, which needs 1.36. Not in CI.
test-floor: venv
	$(PY) tests/cluster/build_tools.py --floor
	KVTIER_FLOOR=1 $(PYTEST) -q tests/cluster tests/chart

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m kvtier_api.generate --check
	$(PY) -m kvtier_api.generate --check --output charts/kvtier/files/crds

# Exhaustive: every kill point with every injected error, and N power cuts at random.
crash: venv kernel
	KVTIER_EXHAUSTIVE=1 KVTIER_CUTS=$(N) $(PYTEST) tests/crash tests/vm

bench: venv
	$(PY) -m bench

# A thousand tiers, two thousand nodes and ten thousand volumes on a real API server. About half an hour.
bench-scale: venv cluster-tools
	$(PY) -m bench --scale

manifests: venv
	$(PY) -m kvtier_api.generate
	$(PY) -m kvtier_api.generate --output charts/kvtier/files/crds

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache images.tar
