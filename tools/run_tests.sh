#!/usr/bin/env bash
# Every test, on two cores: suites side by side where they do not disturb each other; meanwhile the cluster's tools and the images
# are built. What a machine lacks is a named skip for a user, and a failure where CI is set.
set -uo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
failed=0
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$logs"' EXIT

suite() { # NAME PYTEST-ARGUMENTS...
  local name=$1 started=$SECONDS code=0
  shift
  echo "== $name"
  "$python" -m pytest -q "$@" || code=1
  [ $code -eq 0 ] || echo "== $name FAILED"
  echo "== $name: $((SECONDS - started)) s"
  return $code
}

side_by_side() { # FUNCTION FUNCTION...: each one's output is shown when it has ended
  local each
  local -A running=()
  for each in "$@"; do
    "$each" >"$logs/$each" 2>&1 &
    running[$each]=$!
  done
  for each in "$@"; do
    wait "${running[$each]}" || failed=1
    cat "$logs/$each"
  done
}

control_plane() {
  suite "controller, node service and chart on a control plane" -m "not whole_node" tests/cluster tests/chart tests/node/csi/test_sanity.py
}
whole_node() {
  suite "installed by Helm on a whole node" -m whole_node tests/cluster
}

tools/cluster_packages.sh || failed=1
nice -n 10 "$python" tests/cluster/built_images.py >"$logs/images" 2>&1 &
images=$!
nice -n 10 "$python" tests/cluster/build_tools.py >"$logs/tools" 2>&1 &
tools=$!
suite "api, engine, node, controller, command line" -n 2 tests/api tests/engine tests/node tests/operator tests/cli tests/demo \
  --ignore tests/node/csi/test_sanity.py || failed=1 # that one needs the cluster's tools
suite "crashes on this host" -n 2 tests/crash || failed=1
suite "power cuts in a virtual machine" -n 2 tests/vm || failed=1

echo "== the cluster's tools"
started=$SECONDS
wait $tools || { failed=1; echo "== the cluster's tools FAILED"; }
cat "$logs/tools"
echo "== the cluster's tools: waited $((SECONDS - started)) s"
echo "== the images of the Dockerfile"
wait $images || { failed=1; echo "== the images of the Dockerfile FAILED"; }
cat "$logs/images"
side_by_side control_plane whole_node
exit $failed
