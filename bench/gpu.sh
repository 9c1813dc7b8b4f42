#!/usr/bin/env bash
# On a GPU machine, from the folder that deploy/bundle.sh made: runs the GPU tests, the decode benchmark and its peers, and
# prints one table.
# usage: gpu.sh [tests] [bench] [peers] [table] [sanitize]      (default: the first four)
#   tests   every test labelled gpu; needs root for the daemon's namespaces, else does without
#   sanitize  the kernels' parity tests under compute-sanitizer: memcheck, racecheck, initcheck, case by case
#   bench   step_bench: one layer over local KV, 16K to 4M tokens; decode_bench: Llama-3.1-8B at 32K, 128K, 512K and a
#           4-KV-head shape at 1M, up to 512K tokens in all
#   peers   dense attention, the authors' step, NIXL, UCX's own messages: what of them python3 finds
#   table   figures, ratios and checks of all that ran, into decode_bench.json
#   KVD_OUT      folder of logs and results; default: results beside this script
#   KVD_QUICK=1  32K and 128K tokens only, without the 4-KV-head shape and step_bench
#   KVD_COMMIT   commit of the bundle; default: the file commit in it
#   KVD_DAEMON_GPU  the daemon's GPU, default 0; the worker's is 0
#   KVD_UCX      folder libucx of the wheel libucx-cu13, for UCX's own messages and the ucx path with CUDA
#   KVD_SANITIZE_SECONDS  most that one case takes under one tool; default 60
#   KVD_SANITIZE_CASES    regular expression: only the cases in whose name it is found
#   KVD_SANITIZE_JOBS     cases at once; default 8
# Python packages of the peers: torch, numpy, fa3-fwd 0.0.3, locks-kv 0.1.4, nixl-cu13 1.5.1, on PYTHONPATH.
# Exits 1 if a test or a check failed. Leave the machine alone meanwhile: it takes its GPU whole.
set -uo pipefail
case " $* " in *" -h "* | *" --help "*) sed -n '2,20p' "$0" | cut -c3-; exit 0 ;; esac
here=$(cd "$(dirname "$0")" && pwd)
[ -d "$here/bin" ] || here=$(cd "$here/../out/bundle" 2>/dev/null && pwd) || {
  echo "gpu.sh: expected bin/ beside this script or ../out/bundle: run deploy/bundle.sh first" >&2; exit 2; }
bin=$here/bin
out=${KVD_OUT:-$here/results}
commit=${KVD_COMMIT:-$(cat "$here/commit")}
mkdir -p "$out"
failed=0
[ "$#" -gt 0 ] || set -- tests bench peers table

llama=(--shape=llama --tokens=32K,128K,512K --batch=1,4,16 --most_tokens=512K)
hk4=(--shape=hk4 --tokens=1M --batch=1)
# What decode_bench and step_bench run, for the peers.
llama_cases=1x16K,1x32K,1x128K,1x256K,1x512K,1x1M,4x32K,16x32K,4x128K,8x32K,8x128K,1x4M
hk4_cases=1x128K,1x1M
if [ -n "${KVD_QUICK:-}" ]; then
  llama=(--shape=llama --tokens=32K,128K --batch=1,4 --most_tokens=128K)
  llama_cases=1x32K,1x128K,4x32K
fi
daemon_gpu=${KVD_DAEMON_GPU:-0}
export KVD_TEST_DAEMON_GPU=$daemon_gpu
bench_flags=(--commit="$commit" --fetches --fill_threads="$(nproc)" --daemon_gpu="$daemon_gpu")
[ "$(id -u)" -ne 0 ] || bench_flags+=(--own_namespaces)

run_tests() {
  local test name
  : >"$out/tests.txt"
  for test in "$bin"/*_test; do
    name=$(basename "$test")
    if timeout 120 "$test" >"$out/$name.log" 2>&1; then
      echo "$name: $(grep -cE '^\[  SKIPPED \] .*\(' "$out/$name.log") skipped, $(grep -E '^\[  PASSED  \]' "$out/$name.log" | cut -c13-)" >>"$out/tests.txt"
    else
      echo "$name: FAILED, see $out/$name.log" >>"$out/tests.txt"
      grep -E '^\[  FAILED  \]|Failure|error:' -A4 "$out/$name.log" | head -n 30
      failed=1
    fi
  done
  cat "$out/tests.txt"
}

run_bench() {
  if [ -z "${KVD_QUICK:-}" ]; then
    "$bin/step_bench" --commit="$commit" --json="$out/step.json" >"$out/step.log" 2>"$out/step.err" || failed=1
    cat "$out/step.log"; tail -n 3 "$out/step.err"
  fi
  "$bin/decode_bench" "${llama[@]}" "${bench_flags[@]}" --json="$out/llama.json" >"$out/llama.log" 2>"$out/llama.err" || failed=1
  cat "$out/llama.log"; tail -n 3 "$out/llama.err"
  [ -z "${KVD_UCX:-}" ] || run_cuda_ucx
  [ -z "${KVD_QUICK:-}" ] || return 0
  "$bin/decode_bench" "${hk4[@]}" "${bench_flags[@]}" --json="$out/hk4.json" >"$out/hk4.log" 2>"$out/hk4.err" || failed=1
  cat "$out/hk4.log"; tail -n 3 "$out/hk4.err"
}

# The ucx path with the wheel's UCX, which has CUDA, in place of the bundle's: the programs find it beside their own copies.
# The daemon shares this process's namespaces: cuda_ipc does not cross them.
run_cuda_ucx() {
  local there=$out/cuda_ucx
  rm -rf "$there"
  mkdir -p "$there/bin"
  cp -a "$bin/locks-kvd" "$bin/decode_bench" "$bin/gpu_ucx_test" "$there/bin/"
  cp -a "$here/lib" "$there/"
  rm -rf "$there"/lib/libuc* "$there/lib/ucx"
  cp -a "$KVD_UCX"/lib/. "$there/lib/"
  timeout 300 "$there/bin/gpu_ucx_test" >"$out/cuda_ucx_test.log" 2>&1 || { failed=1; echo "gpu_ucx_test with CUDA in UCX: FAILED, see $out/cuda_ucx_test.log"; }
  "$there/bin/decode_bench" --shape=llama --tokens=32K --batch=1 --steps=4 --pool=peer --fetches --commit="$commit" --fill_threads="$(nproc)" \
    --daemon_gpu="$daemon_gpu" --json="$out/cuda_ucx.json" >"$out/cuda_ucx.log" 2>"$out/cuda_ucx.err" || failed=1
  grep 'ucx path' "$out/cuda_ucx.log"; grep '^decode_bench: ucx' "$out/cuda_ucx.err"
  rm -rf "$there"
}

# A peer that is not installed, or fails, is left out of the table and said so.
peer() {
  local name=$1
  shift
  timeout 300 "$@" >>"$out/peers.jsonl" 2>"$out/$name.err" || echo "gpu.sh: no figures of $name: $(tail -n 1 "$out/$name.err")"
}

run_nixl() {
  local meet
  meet=$(mktemp -d)
  CUDA_VISIBLE_DEVICES=$daemon_gpu timeout 120 python3 "$bin/peers/nixl_read_gpu.py" target nixl "$meet" 40 >"$out/nixl_target.log" 2>&1 &
  CUDA_VISIBLE_DEVICES=0 peer nixl_read_gpu python3 "$bin/peers/nixl_read_gpu.py" reader nixl "$meet" 40
  wait
  rm -rf "$meet"
}

run_peers() {
  rm -f "$out/peers.jsonl"
  if ! python3 -c 'import torch' 2>"$out/torch.err"; then
    echo "gpu.sh: no peers: python3 has no torch"
    return
  fi
  local peer_name
  for peer_name in dense_attention locks_step; do
    peer "$peer_name" python3 "$bin/peers/$peer_name.py" --shape=llama --cases="$llama_cases"
    [ -n "${KVD_QUICK:-}" ] || peer "${peer_name}_hk4" python3 "$bin/peers/$peer_name.py" --shape=hk4 --cases="$hk4_cases"
  done
  run_nixl
  [ -z "${KVD_UCX:-}" ] || peer ucx_am python3 "$bin/peers/ucx_am.py" "$KVD_UCX"
  cat "$out/peers.jsonl"
}

# Some cases under one tool: prints the verdict; the log is kept where it is not clean. What initcheck says of a test that
# downloads bytes which nobody writes (padding, ends of lists) is no kernel's fault.
sanitize_cases() {
  local tool=$1 cases=$2 log rc
  log=$out/sanitize_${tool}_$(tr -cd 'A-Za-z0-9' <<<"$cases").log
  timeout "${KVD_SANITIZE_SECONDS:-60}" compute-sanitizer --tool "$tool" --print-limit 100000 --error-exitcode 9 \
    "$bin/parity_test" --gtest_filter="$cases" >"$log" 2>&1
  rc=$?
  if [ "$rc" -eq 124 ]; then
    echo "$tool $cases: not known, did not end in ${KVD_SANITIZE_SECONDS:-60} s"
  elif grep -q 'Device not supported' "$log"; then
    echo "$tool $cases: not run, this machine's runtime does not let the tool in"
  elif [ "$rc" -ne 0 ] && { [ "$tool" != initcheck ] || ! grep -q '^\[  PASSED  \]' "$log" || grep -qE '__(global|shared)__' "$log"; }; then
    echo "$tool $cases: FAILED, see $log"
    return
  else
    echo "$tool $cases: clean"
  fi
  rm -f "$log"
}

# Case by case, so that each ends. Not those that race with a host thread on purpose (no unit of theirs is whole at a tool's
# speed), the large arenas (minutes for each gigabyte) and what makes no call to the GPU.
run_sanitize() {
  local cases
  if ! command -v compute-sanitizer >/dev/null; then
    echo "gpu.sh: not sanitized: no compute-sanitizer on PATH"
    return
  fi
  cases=$("$bin/parity_test" --gtest_list_tests | awk '/^[A-Za-z].*\./ {suite = $1} /^  / {print suite $1}' | grep -vE 'Rewritten|^LargeArena|^BuiltGeometries' |
    grep -E "${KVD_SANITIZE_CASES:-.}")
  export -f sanitize_cases
  export out bin
  # Verdicts are written as they come: a run that is cut short has said what it knows.
  for tool in memcheck racecheck initcheck; do
    for each in $cases; do printf '%s %s\n' "$tool" "$each"; done
  done | xargs -P "${KVD_SANITIZE_JOBS:-8}" -L 1 bash -c 'sanitize_cases "$0" "$1"' >"$out/sanitize.txt"
  for tool in memcheck racecheck initcheck; do
    echo "$tool: $(grep -c "^$tool.*clean" "$out/sanitize.txt") of $(grep -c "^$tool" "$out/sanitize.txt") clean"
  done
  grep -v 'clean$' "$out/sanitize.txt" | sort
  ! grep -q FAILED "$out/sanitize.txt" || failed=1
}

for part in "$@"; do
  case "$part" in
    sanitize) run_sanitize ;;
    tests) run_tests ;;
    bench) run_bench ;;
    peers) run_peers ;;
    table) python3 "$bin/peers/gpu_table.py" "$out" || failed=1 ;;
    *) echo "gpu.sh: unknown part '$part': expected tests, bench, peers, table or sanitize" >&2; exit 2 ;;
  esac
done
exit "$failed"
