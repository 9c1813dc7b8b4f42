#!/usr/bin/env bash
# One line for every speed target of the project, from the committed results: name, figure, target, ok or short,
# commit, machine. Exits 1 if one is short or has no result.
# usage: bench/targets.sh [--run]
#   --run  measures afresh what this machine can (CPU benchmarks, NIXL and Mooncake), into build/results/, and
#          judges that
set -euo pipefail
cd "$(dirname "$0")/.."
results=bench/results
case "${1:-}" in
  "") ;;
  --run)
    results=build/results
    mkdir -p "$results"
    cmake --preset cpu >/dev/null
    cmake --build --preset cpu --target kernel_bench fetch_bench -j "$(nproc)" | tail -n 1
    build/cpu/bench/kernel_bench --json "$results/kernel_bench.json"
    build/cpu/bench/fetch_bench --json "$results/fetch_bench.json"
    rm -f "$results/peers.json"  # no old figure stands in for peers that did not run
    KVD_FETCH_BENCH=build/cpu/bench/fetch_bench bash bench/peers.sh --out "$results/peers.json" ||
      echo "targets: no figures of NIXL and Mooncake, see above" >&2
    ;;
  -h | --help) sed -n '2,6p' "$0" | cut -c3-; exit 0 ;;
  *) echo "targets: unknown argument '$1': expected --run" >&2; exit 2 ;;
esac
exec python3 bench/targets.py "$results"
