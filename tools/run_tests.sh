#!/usr/bin/env bash
# Every test, on two cores: the suites that use the CPU side by side first, then those that need the machine to themselves.
set -uo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
failed=0
suite() {
  local name=$1 started=$SECONDS
  shift
  echo "== $name"
  "$python" -m pytest -q "$@" || { failed=1; echo "== $name FAILED"; }
  echo "== $name: $((SECONDS - started)) s"
}
suite "api, engine, node, controller, command line" -n 2 tests/api tests/engine tests/node tests/operator tests/cli tests/demo \
  --ignore tests/node/csi/test_sanity.py # needs the cluster tools: make test-cluster
suite "crashes on this host" -n 2 tests/crash
suite "power cuts in a virtual machine" -n 2 tests/vm
exit $failed
