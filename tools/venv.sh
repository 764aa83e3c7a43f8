#!/usr/bin/env bash
# A virtual environment with the given extras, at the versions of constraints.txt. Idempotent: does nothing if it is up to date.
# Usage: tools/venv.sh .venv dev,engine
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 extras=$2
stamp="$venv/.kvtier-$(cat pyproject.toml constraints.txt tools/venv.sh | sha256sum | cut -c1-16)-${extras//,/_}"
[ -e "$stamp" ] && exit 0
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python 3.11 or newer: set PYTHON" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "$(grep '^uv==' constraints.txt)"
install() { "$venv/bin/uv" pip install -q -p "$venv/bin/python" "$@"; }
if [[ ",$extras," == *,engine,* ]]; then
  # PyPI's Linux build of torch brings about 4 GB of CUDA libraries; take a CPU build where one lies at hand.
  torch=$(grep '^torch==' constraints.txt)
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  if "$venv/bin/python" -m pip download -q --no-deps -d "$wheels" "$torch+cpu" >/dev/null 2>&1; then
    install "$wheels"/torch-*.whl -c constraints.txt
  fi
fi
install -e ".[$extras]" -c constraints.txt
rm -f "$venv"/.kvtier-*
touch "$stamp"
