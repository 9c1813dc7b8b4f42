#!/usr/bin/env bash
# Runs a command where five hosts seem to be: network namespaces d0 to d4 (10.77.0.10 to .14, device eth0), joined by the
# bridge br0 (10.77.0.1), on which the command itself runs. Nothing outside is touched: all of it lives in a user, a network and a
# mount namespace of its own, and ends with the command.
# usage: tests/system/netns.sh COMMAND...        exit code 77: this machine allows no such namespaces
set -euo pipefail
if ! command -v ip >/dev/null || ! command -v nft >/dev/null; then
  echo "netns.sh: SKIPPED: no ip or no nft: apt-get install iproute2 nftables"; exit 77
fi
hosts='
  mount -t tmpfs none /run    # where ip keeps the names
  mount -t sysfs sysfs /sys   # where UCX looks for devices
  ip link set lo up
  ip link add br0 type bridge
  ip addr add 10.77.0.1/24 dev br0
  ip link set br0 up
  for d in 0 1 2 3 4; do
    ip netns add "d$d"
    ip link add "v$d" type veth peer name eth0 netns "d$d"
    ip link set "v$d" master br0 up
    ip -n "d$d" addr add "10.77.0.1$d/24" dev eth0
    ip -n "d$d" link set eth0 up
    ip -n "d$d" link set lo up
  done'
spaces=(unshare --user --map-root-user --net --mount)
if ! problem=$("${spaces[@]}" bash -euc "$hosts
  ip netns exec d1 nft add table inet f" 2>&1); then
  echo "netns.sh: SKIPPED: this machine allows no such namespaces: ${problem##*$'\n'}"; exit 77
fi
exec "${spaces[@]}" bash -euc "$hosts"'
  exec "$@"' netns "$@"
