#!/usr/bin/env bash
# Builds everything that runs on a GPU machine and lays it out in out/bundle, and packs that as out/bundle.tar.xz: a folder
# that runs on any x86-64 machine with a GPU of compute capability 9.0, its driver and glibc 2.36 or later. Nothing needs
# to be installed there.
# usage: deploy/bundle.sh [--build-dir=DIR]      (default: build/dev)
#   out/bundle/gpu.sh   runs the tests and the benchmarks there and prints one table; nvlink.sh: the same between two GPUs
#   out/bundle/bin/     the daemon, locksctl, the tests labelled gpu, the benchmarks; bin/peers: what they are compared with
#   out/bundle/lib/     what they link that glibc does not bring, found by the programs' run path, $ORIGIN/../lib, with
#                       UCX's modules in lib/ucx
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/dev
case "${1:-}" in
  '') ;;
  --build-dir=*) build=${1#--build-dir=} ;;
  *) sed -n '2,10p' "$0" | cut -c3-; exit 2 ;;
esac
largest_mib=60  # of the archive: what the machines of our tests take at once, with the working tree

cmake --preset dev -B "$build" -DKVD_BENCH=ON >/dev/null  # which the test command leaves out
cmake --build "$build" --target kvd_gpu -j "$(nproc)"

# Made beside its place and then put there whole: who runs this twice at once gets one of the two.
mkdir -p out
work=$(mktemp -d out/making.XXXXXX)
trap 'rm -rf "$work"' EXIT
bundle=$work/bundle
mkdir -p "$bundle/bin/peers" "$bundle/lib/ucx"
xargs cp -t "$bundle/bin" <"$build/gpu_programs"
strip --strip-unneeded "$bundle"/bin/*_* "$bundle"/bin/lock*
cp bench/gpu.sh bench/nvlink.sh "$bundle/"
cp bench/peers/dense_attention.py bench/peers/locks_step.py bench/peers/nixl_read_gpu.py bench/peers/{nixl_lists,gpu_graph,gpu_table,common,ucx_am}.py "$bundle/bin/peers/"
{ git describe --always --dirty=+ --abbrev=12 --exclude="*" 2>/dev/null || echo unknown; } >"$bundle/commit"

# Every shared library but glibc's own, which must be the machine's. UCX looks for modules in the folder ucx beside its
# own library; those for RDMA use the machine's own libibverbs, and are passed over where there is none.
libraries=$(for program in $(cat "$build/gpu_programs"); do ldd "$program"; done |
  awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|ld-linux-x86-64)\.so')
echo "$libraries" | xargs cp -L -t "$bundle/lib"
cp -L "$(dirname "$(grep '/libucs\.so' <<<"$libraries")")"/ucx/*.so.0 "$bundle/lib/ucx/"
chmod 644 "$bundle"/lib/*.so* "$bundle"/lib/ucx/*
strip --strip-unneeded "$bundle"/lib/*.so* "$bundle"/lib/ucx/*

# A program that finds a library outside the bundle would not start on another machine.
for program in $(xargs -n1 basename <"$build/gpu_programs"); do
  stray=$(env -u LD_LIBRARY_PATH ldd "$bundle/bin/$program" | awk '$2 == "=>" {print $3}' | grep -v "$PWD/$bundle/bin/../lib/" |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv)\.so' || true)
  [ -z "$stray" ] || { echo "bundle.sh: $program: expected its libraries in $bundle/lib, got $stray" >&2; exit 1; }
done

# Each program holds the kernels: with a window as large as the folder the archive has them once.
tar -C "$work" -cf - bundle | xz -T1 --lzma2=preset=3,dict=256MiB >"$work/bundle.tar.xz"
rm -rf out/bundle
mv "$work/bundle" "$work/bundle.tar.xz" out/
size_mib=$(du -m out/bundle.tar.xz | cut -f1)
echo "bundle.sh: out/bundle, $(du -sm out/bundle | cut -f1) MiB; out/bundle.tar.xz, $size_mib MiB"
if [ "$size_mib" -ge "$largest_mib" ]; then
  echo "bundle.sh: expected less than $largest_mib MiB, got $size_mib" >&2
  exit 1
fi
