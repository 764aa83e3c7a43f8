#!/usr/bin/env bash
# The Debian packages that a whole node needs beside what tools/system_packages.sh installs. Root only.
set -euo pipefail
missing=()
for pair in runc:runc iptables:iptables ip:iproute2 nsenter:util-linux ldd:libc-bin; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
[ ${#missing[@]} -eq 0 ] && exit 0
[ "$(id -u)" -eq 0 ] || { echo "not installed: ${missing[*]}" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
