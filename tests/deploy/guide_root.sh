#!/usr/bin/env bash
# Runs every command of the operator's guide in a fresh minimal Debian 12, from a tarball: nothing of this machine is there but the
# tarball and the test. Needs root, debootstrap and a network.
# usage: sudo tests/deploy/guide_root.sh TARBALL      (deploy/tarball.sh makes one)
set -euo pipefail
cd "$(dirname "$0")/../.."

[ "$#" -eq 1 ] && [ -f "$1" ] || { echo "guide_root: expected a tarball: see the head of this file" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo "guide_root: expected root, which debootstrap and chroot need: use sudo" >&2; exit 1; }
root=$(mktemp -d "${TMPDIR:-/tmp}/kvd_guide_root.XXXXXX")
chmod 755 "$root"
trap 'rm -rf --one-file-system "$root"' EXIT
# What the guide asks for, and Python for the test that reads it.
debootstrap --variant=minbase --include=ca-certificates,curl,openssl,iproute2,procps,python3,python3-yaml bookworm "$root" >"$root.log" 2>&1 ||
  { tail -n 20 "$root.log" >&2; exit 1; }
mkdir -p "$root/src/tests" "$root/src/deploy"
cp -r tests/deploy "$root/src/tests/"
cp -r deploy/docs deploy/helm "$root/src/deploy/"
cp CMakeLists.txt "$root/src/"
cp "$1" "$root/tarball.tar.gz"
# A mount, process and network namespace: whatever the guide leaves behind goes with it.
unshare --mount --pid --net --fork --kill-child bash -euc '
  ip link set lo up
  mount -t proc proc "$1/proc"
  mount --rbind /dev "$1/dev"
  mount -t sysfs sysfs "$1/sys"
  exec chroot "$1" env -i PATH=/usr/bin:/bin HOME=/root KVD_TARBALL=/tarball.tar.gz \
    python3 -B /src/tests/deploy/test_guide.py OperatorsGuideTest' guide_root "$root"
