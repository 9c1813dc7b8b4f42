#!/usr/bin/env bash
# Sets up, builds and runs every test that this machine can run.
# usage: tests/run.sh [cpu|asan|tsan]... [-- ctest arguments]      (default: cpu)
# GPU code is compiled where nvcc 13 or later is found; GPU tests run where there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

presets=()
ctest_arguments=()
while [ "$#" -gt 0 ]; do
  case "$1" in
    cpu | asan | tsan) presets+=("$1") ;;
    --) shift; ctest_arguments=("$@"); break ;;
    -h | --help) sed -n '2,4p' "$0" | cut -c3-; exit 0 ;;
    *) echo "run.sh: unknown argument '$1': expected cpu, asan, tsan or --" >&2; exit 2 ;;
  esac
  shift
done
[ "${#presets[@]}" -gt 0 ] || presets=(cpu)

bash deploy/install_deps.sh build
# The trace tool's own test needs numpy and the weights; without them it says that it was skipped.
bash deploy/install_deps.sh trace || echo "run.sh: no Python packages: the trace tests will be SKIPPED"
deploy_tools=no
case " ${presets[*]} " in
  *" cpu "*)
    if bash deploy/install_deps.sh deploy; then deploy_tools=yes; else
      echo "run.sh: no helm, promtool or Python packages: the deploy tests will be SKIPPED"
    fi ;;
esac

if [ -x build/venv/bin/python ]; then build/venv/bin/python -B bench/trace/test_trace.py; else
  echo "run.sh: trace tests SKIPPED: no build/venv"
fi

# Chart, packages, alert rules, guides: only the cpu preset's binaries are what would be deployed.
deploy_tests() {
  if [ "${#ctest_arguments[@]}" -gt 0 ]; then echo "run.sh: deploy tests SKIPPED: ctest arguments choose tests"; return; fi
  if [ "$deploy_tools" = no ]; then echo "run.sh: deploy tests SKIPPED: their tools could not be installed"; return; fi
  local test
  for test in tests/deploy/test_*.py; do
    echo "run.sh: $test"
    KVD_BUILD_DIR="$PWD/build/cpu" PATH="$PWD/build/tools:$PATH" build/venv/bin/python -B "$test"
  done
}

jobs=$(nproc)
nvcc_major=$( (nvcc --version 2>/dev/null || true) | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
if [ "${nvcc_major:-0}" -ge 13 ]; then
  echo "run.sh: nvcc $nvcc_major found: building the GPU code"
  cmake --preset dev -DKVD_BENCH=OFF >/dev/null
  cmake --build --preset dev --target kvd_gpu -j "$jobs"
else
  echo "run.sh: GPU code not built: nvcc 13 or later was not found"
fi

for preset in "${presets[@]}"; do
  echo "run.sh: $preset"
  cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset" -j "$jobs"
  # The presets set what a sanitizer needs: tsan does without UCX's memory hooks, which do not go together with it.
  ctest --preset "$preset" --no-tests=error -j "$jobs" "${ctest_arguments[@]}"
  if [ "$preset" = cpu ]; then deploy_tests; fi
done
