#!/usr/bin/env bash
# Sets up, builds, makes a KV trace of a real model, starts two pool daemons and replays the model's decode
# steps through them, on the shared path and on the ucx path (TCP). Exits 0 only if every check held.
# usage: bench/quickstart.sh [--synthetic] [--kill-one]
#   --synthetic  do not look for the model's weights; use generated keys and queries
#   --kill-one   kill one of the two daemons in the middle of the decode (the worker must go on)
# Leaves build/demo/: tables (JSON), the recall plot (SVG), daemon logs.
set -euo pipefail
cd "$(dirname "$0")/.."

synthetic=0
kill_one=0
for argument in "$@"; do
  case "$argument" in
    --synthetic) synthetic=1 ;;
    --kill-one) kill_one=1 ;;
    -h | --help) sed -n '2,7p' "$0" | cut -c3-; exit 0 ;;
    *) echo "quickstart: unknown argument '$argument': expected --synthetic or --kill-one" >&2; exit 2 ;;
  esac
done

say() { echo "quickstart: $*"; }
out=build/demo
mkdir -p "$out"
bin=build/cpu

say "1/5 installing what is missing"
bash deploy/install_deps.sh build

say "2/5 building (several minutes on two cores, seconds when nothing changed)"
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target locks-kvd locksctl demo_put demo_decode -j "$(nproc)" | tail -n 1

say "3/5 making the KV trace"
trace=build/trace/smollm2.kvt
metric=build/trace/smollm2.kvq
if [ "$synthetic" -eq 0 ] && { [ ! -f "$trace" ] || [ ! -f "$metric" ]; }; then
  if bash deploy/install_deps.sh trace &&
    build/venv/bin/python bench/trace/dump_trace.py trace --out "$trace" &&
    build/venv/bin/python bench/trace/dump_trace.py metric --out "$metric"; then
    :
  else
    synthetic=1
    echo "**************************************************************************************"
    echo "quickstart: THE MODEL'S WEIGHTS CANNOT BE HAD: using SYNTHETIC keys, values and queries."
    echo "quickstart: the figures below say nothing about models."
    echo "**************************************************************************************"
  fi
fi
if [ "$synthetic" -eq 1 ]; then
  trace=synthetic
  metric=""
fi

pids=()
stop_daemons() {
  local pid
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
}
trap stop_daemons EXIT

say "4/5 starting two daemons"
addresses=()
for i in 1 2; do
  rm -f "$out/ready$i"
  mkdir -p "$out/socket$i"
  chmod 0750 "$out/socket$i"
  # demo_put knows the trace's geometry and writes the daemon's configuration.
  "$bin/bench/demo_put" --trace="$trace" --metric="$metric" --print_config \
    --socket_dir="$PWD/$out/socket$i" --ready_file="$PWD/$out/ready$i" >"$out/daemon$i.textproto"
  "$bin/service/locks-kvd" --config "$out/daemon$i.textproto" 2>"$out/daemon$i.log" &
  pids+=($!)
done
for i in 1 2; do
  for _ in $(seq 100); do [ -s "$out/ready$i" ] && break; sleep 0.1; done
  [ -s "$out/ready$i" ] || { say "daemon $i did not start; its log:"; cat "$out/daemon$i.log"; exit 1; }
  addresses+=("$(sed -n 's/^control_address: "\(.*\)"$/\1/p' "$out/ready$i")")
done
daemons=$(IFS=,; echo "${addresses[*]}")
say "daemons at $daemons"

say "5/5 putting the prompt's pages, then decoding on both paths"
"$bin/bench/demo_put" --trace="$trace" --metric="$metric" --daemons="$daemons"
status=0
for path in shared ucx; do
  "$bin/bench/demo_decode" --trace="$trace" --metric="$metric" --daemons="$daemons" --path="$path" \
    --json="$out/demo_$path.json" --plot="$out/recall_$path.svg" || status=1
done
if [ "$kill_one" -eq 1 ]; then
  "$bin/bench/demo_decode" --trace="$trace" --metric="$metric" --daemons="$daemons" --path=shared \
    --kill_pid="${pids[1]}" --json="$out/demo_killed.json" || status=1
fi
"$bin/client/locksctl" status $(printf -- '--daemon %s ' "${addresses[0]}")

trap - EXIT
for i in 0 1; do
  kill -TERM "${pids[$i]}" 2>/dev/null || true
  code=0
  wait "${pids[$i]}" || code=$?
  expected=0
  [ "$kill_one" -eq 1 ] && [ "$i" -eq 1 ] && expected=137
  [ "$code" -eq "$expected" ] || { say "daemon $((i + 1)) ended with $code, expected $expected; see $out/daemon$((i + 1)).log"; status=1; }
done
[ "$status" -eq 0 ] && say "every check held; tables and plot are in $out/" || say "A CHECK FAILED; see above"
exit "$status"
