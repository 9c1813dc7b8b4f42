#!/usr/bin/env bash
# On a machine with two GPUs, from the folder that deploy/bundle.sh made: the GPU tests and the decode benchmark with the
# daemon on GPU 1 and the worker on GPU 0, in PID, IPC and mount namespaces of their own, and one table.
# usage: nvlink.sh [--dry-run] [tests] [bench] [peers] [table]      (default: all four; as gpu.sh has them)
#   --dry-run  both processes on GPU 0: for a machine with one
# Environment: as for gpu.sh; results go to results-nvlink. NVLink multicast stays off: nothing here uses it.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export KVD_DAEMON_GPU=1
if [ "${1:-}" = --dry-run ]; then
  export KVD_DAEMON_GPU=0
  shift
elif [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -lt 2 ]; then
  echo "nvlink.sh: expected two GPUs, found $(nvidia-smi -L 2>/dev/null | wc -l): use --dry-run" >&2
  exit 2
fi
case "${1:-}" in -h | --help) sed -n '2,7p' "$0" | cut -c3-; exit 0 ;; esac
export KVD_OUT=${KVD_OUT:-$here/results-nvlink} NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
# NCCL for bulk moves: the one that comes with the machine's PyTorch.
nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null) &&
  export LD_LIBRARY_PATH=$nccl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
code=0
bash "$here/gpu.sh" "$@" || code=$?
grep -h '^bulk move' "$KVD_OUT/nccl_communicator_test.log" 2>/dev/null ||
  echo 'bulk move of 256 MiB by NCCL, GB/s, and over cudaMemcpyPeer                   not run'
killed='one side killed in the middle of a bulk move                                 '
case $(grep 'ADestinationThatIsKilledInTheMiddleCostsNoPage (' "$KVD_OUT/gpu_moves_test.log" 2>/dev/null) in
  *OK*) echo "$killed no page lost" ;;
  *FAILED*) echo "$killed FAILED" ;;
  *) echo "$killed not run" ;;
esac
[ -n "${KVD_UCX:-}" ] ||
  echo 'the ucx path with CUDA over NVLink                                            not run: KVD_UCX names no UCX with CUDA'
exit "$code"
