#!/usr/bin/env bash
# Runs a command on a clean clone of HEAD in a fresh minimal Debian 12, so that no package which happens to be on
# this machine hides a missing install step. Needs root, debootstrap (apt-get install debootstrap) and a network.
# usage: tests/clean_root.sh [--keep] COMMAND...
#   for example: sudo tests/clean_root.sh bash tests/run.sh
#   --keep  leaves the root where it is and says where; otherwise it is removed
# Only what a fresh machine of this network has is brought in: the resolver's configuration and the CA certificates.
set -euo pipefail
cd "$(dirname "$0")/.."

keep=no
case "${1:-}" in
  --keep) keep=yes; shift ;;
  -h | --help) sed -n '2,7p' "$0" | cut -c3-; exit 0 ;;
esac
[ "$#" -gt 0 ] || { echo "clean_root: expected a command: see --help" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo "clean_root: expected root, which debootstrap and chroot need: use sudo" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "clean_root: no debootstrap: apt-get install debootstrap" >&2; exit 1; }

root=$(mktemp -d "${TMPDIR:-/tmp}/kvd_clean_root.XXXXXX")
chmod 755 "$root"  # apt downloads as a user of its own
log=$root.log
cleanup() {
  if [ "$keep" = yes ]; then echo "clean_root: kept $root"; else rm -rf --one-file-system "$root"; fi
}
trap cleanup EXIT

echo "clean_root: debootstrap, log in $log"
debootstrap --variant=minbase --include=ca-certificates bookworm "$root" >"$log" 2>&1 || { tail -n 20 "$log" >&2; exit 1; }
cp /etc/resolv.conf "$root/etc/resolv.conf"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
git clone -q . "$root/src"
echo "clean_root: $(git -C "$root/src" rev-parse --short HEAD) in $root: $*"

# A mount and a process namespace: whatever the command leaves behind goes with it. pip brings CAs of its own and has
# to be told the system's.
certificates=/etc/ssl/certs/ca-certificates.crt
unshare --mount --pid --fork --kill-child bash -c '
  root=$1; shift
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --rbind /sys "$root/sys"  # where UCX looks for network devices
  exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PIP_CERT='$certificates' bash -c "cd /src && exec \"\$@\"" command "$@"
' clean_root "$root" "$@"
