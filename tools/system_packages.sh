#!/usr/bin/env bash
# The Debian packages that the tests and the demo need. As root they are installed; otherwise what is missing is named.
# Sets up nothing else: Python packages are `make venv`'s, the kernel of tests/vm is tests/vm's.
set -euo pipefail

# program:package - a program that answers proves that the package is there
declare -A packages=(
  [strace]=strace [mkfs.ext4]=e2fsprogs [mkfs.xfs]=xfsprogs [mkfs.btrfs]=btrfs-progs [mkfs.f2fs]=f2fs-tools [cryptsetup]=cryptsetup-bin [dmsetup]=dmsetup
  [losetup]=mount [unshare]=util-linux [fio]=fio [patchelf]=patchelf [kmod]=kmod
  [mkfs.btrfs]=btrfs-progs [mkfs.f2fs]=f2fs-tools
)
missing=()
for program in "${!packages[@]}"; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing+=("${packages[$program]}")
done
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed: ${missing[*]}. Tests that need them are skipped; install them to run all." >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
