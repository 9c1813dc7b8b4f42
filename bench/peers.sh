#!/usr/bin/env bash
# Our paths beside NIXL and Mooncake on one host without a GPU: lists of 512 random 8 KiB units out of 1 GiB of
# another process. Each round runs every program once, a different one first; a ratio compares figures of one round.
# usage: bench/peers.sh [--rounds N] [--out FILE]     (default: 5 rounds, build/results/peers.json)
#   KVD_FETCH_BENCH  a fetch_bench that is built already; else it is built in build/cpu
# Checks every byte that a peer brings. Exits 1, with the logs of both ends, when a peer fails, brings a wrong byte
# or takes longer than two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=5
out=build/results/peers.json
while [ "$#" -gt 0 ]; do
  case "$1" in
    --rounds | --out)
      [ "$#" -gt 1 ] || { echo "peers: $1 wants a value" >&2; exit 2; }
      if [ "$1" = --rounds ]; then rounds=$2; else out=$2; fi
      shift 2
      ;;
    -h | --help) sed -n '2,7p' "$0" | cut -c3-; exit 0 ;;
    *) echo "peers: unknown argument '$1': expected --rounds or --out" >&2; exit 2 ;;
  esac
done
[[ "$rounds" =~ ^[1-9][0-9]*$ ]] || { echo "peers: --rounds $rounds: expected a positive number" >&2; exit 2; }

fetch_bench=${KVD_FETCH_BENCH:-build/cpu/bench/fetch_bench}
if [ -z "${KVD_FETCH_BENCH:-}" ]; then
  cmake --preset cpu >/dev/null
  cmake --build --preset cpu --target fetch_bench -j "$(nproc)" | tail -n 1
fi
[ -x "$fetch_bench" ] || { echo "peers: KVD_FETCH_BENCH: $fetch_bench is no program" >&2; exit 2; }
bash deploy/install_deps.sh peers || {
  echo "peers: NIXL and Mooncake could not be installed: are Debian's mirror and PyPI within reach?" >&2
  exit 1
}
python=$PWD/build/venv/bin/python
repetitions=200
limit_s=120
work=$(mktemp -d)
running=()
trap 'kill "${running[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT

# UCX polls: each of its processes gets a core of its own. Mooncake waits, and is faster when left alone.
reader_core=$(($(nproc) > 1 ? 1 : 0))

fail() {
  local name=$1 meet=$2
  for end in target reader; do sed "s/^/$name $end: /" "$meet/$end.log" >&2; done
  echo "peers: $name failed or took more than $limit_s s: see its lines above" >&2
  exit 1
}

# peer NAME SCRIPT pinned|free ROUND [OPTION=VALUE]...: runs both ends of a peer; its figures go to peer.NAME.ROUND.json
peer() {
  local name=$1 script=$2 pin=$3 round=$4 target_pin=() reader_pin=() meet
  shift 4
  meet=$(mktemp -d "$work/meet.XXXXXX")
  if [ "$pin" = pinned ]; then target_pin=(taskset -c 0) reader_pin=(taskset -c "$reader_core"); fi
  timeout "$limit_s" "${target_pin[@]}" "$python" "bench/peers/$script" target "$name" "$meet" "$repetitions" "$@" \
    >"$meet/target.log" 2>&1 &
  local target=$!
  timeout "$limit_s" "${reader_pin[@]}" "$python" "bench/peers/$script" reader "$name" "$meet" "$repetitions" "$@" \
    >"$meet/reader.log" 2>&1 &
  local reader=$!
  running=("$target" "$reader")
  # Whichever ends first: a failed end is not waited for by the other.
  wait -n "$target" "$reader" || fail "$name" "$meet"
  wait "$reader" || fail "$name" "$meet"
  wait "$target" || fail "$name" "$meet"
  running=()
  grep '^{"name"' "$meet/reader.log" >"$work/peer.$name.$round.json" || fail "$name" "$meet"
}

ours() {
  "$fetch_bench" --repetitions="$repetitions" --json="$work/fetch_bench.$1.json" >"$work/fetch_bench.log" 2>&1 || {
    cat "$work/fetch_bench.log" >&2
    echo "peers: fetch_bench failed: see its lines above" >&2
    exit 1
  }
}

# The fastest settings found of each peer, and what was tried: bench/README.md.
nixl_shm() {
  UCX_TLS=shm,tcp,self UCX_NET_DEVICES=lo peer nixl_shm nixl_read.py pinned "$1"
}
nixl_shm_unguarded() {
  UCX_TLS=posix,sysv,tcp,self UCX_NET_DEVICES=lo \
    peer nixl_shm_unguarded nixl_read.py pinned "$1" ucx_error_handling_mode=none
}
nixl_tcp() {
  UCX_TLS=tcp,self UCX_NET_DEVICES=lo UCX_TCP_TX_SEG_SIZE=16k peer nixl_tcp nixl_read.py pinned "$1"
}
mooncake_tcp() {
  MC_TCP_BIND_ADDRESS=127.0.0.1 MC_TCP_PROTO=1 MC_TCP_LANES_PER_PEER=16 \
    peer mooncake_tcp mooncake_read.py free "$1"
}

programs=(ours nixl_shm nixl_shm_unguarded nixl_tcp mooncake_tcp)
for ((round = 1; round <= rounds; ++round)); do
  for ((i = 0; i < ${#programs[@]}; ++i)); do
    program=${programs[$(((round + i) % ${#programs[@]}))]}
    echo "peers: round $round of $rounds: $program"
    "$program" "$round"
  done
done
mkdir -p "$(dirname "$out")"
"$python" bench/peers/merge.py "$work" "$out"
