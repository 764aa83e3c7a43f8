#!/usr/bin/env bash
# The Debian packages that a whole node and its images need beside what tools/system_packages.sh installs. Root only.
set -euo pipefail
missing=()
for pair in runc:runc iptables:iptables ip:iproute2 nsenter:util-linux ldd:libc-bin buildah:buildah mmdebstrap:mmdebstrap; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed: ${missing[*]}. Tests that need them are skipped; install them to run all." >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
