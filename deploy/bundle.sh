#!/usr/bin/env bash
# Builds the GPU programs and lays them out in out/bundle: a folder that runs on any x86-64 machine with a GPU
# of compute capability 9.0, its driver and glibc 2.36 or later. Nothing needs to be installed there.
# usage: deploy/bundle.sh [--build-dir=DIR]      (default: build/dev)
#   out/bundle/bin/parity_test       the GPU kernels against the CPU reference
#   out/bundle/bin/gpu_kernel_bench  their rates beside plain read and copy
#   out/bundle/lib/                  what they link that glibc does not bring, found by the programs' run path, $ORIGIN/../lib
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/dev
case "${1:-}" in
  '') ;;
  --build-dir=*) build=${1#--build-dir=} ;;
  *) sed -n '2,8p' "$0" | cut -c3-; exit 2 ;;
esac
bundle=out/bundle
largest_mib=64

cmake --preset dev -B "$build" -DKVD_BENCH=ON >/dev/null  # which the test command leaves out
cmake --build "$build" --target kvd_gpu -j "$(nproc)"

rm -rf "$bundle"
mkdir -p "$bundle/bin" "$bundle/lib"
cp "$build/tests/kernels/parity_test" "$build/bench/gpu_kernel_bench" "$bundle/bin/"

# Every shared library but glibc's own, which must be the machine's.
for program in "$bundle"/bin/*; do
  ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|ld-linux-x86-64)\.so'
done | sort -u | xargs -r cp -L -t "$bundle/lib"
for file in "$bundle"/bin/* "$bundle"/lib/*; do strip --strip-unneeded "$file"; done

size_mib=$(du -sm "$bundle" | cut -f1)
echo "bundle.sh: $bundle, $size_mib MiB"
if [ "$size_mib" -ge "$largest_mib" ]; then
  echo "bundle.sh: expected less than $largest_mib MiB, got $size_mib" >&2
  exit 1
fi
