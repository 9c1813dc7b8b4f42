"""Judges the project's speed targets against a folder of results. Called by bench/targets.sh."""

import json
import pathlib
import sys

# name, results file, figure, what is compared: "ratio" or "value" at least the bound, or "us", which is a value of at
# most the bound, whatever its unit; bound None: shown, nothing is promised
TARGETS = [
    ("shared path over memcpy, 512 x 8 KiB", "fetch_bench.json", "fetch/shared/512x8KiB", "ratio", 0.8),
    ("ucx list over gather + one message, 512 x 8 KiB", "fetch_bench.json", "fetch/ucx/512x8KiB", "ratio", 0.8),
    ("ucx list over single requests, 512 x 8 KiB", "fetch_bench.json",
     "fetch/ucx_over_single_requests/512x8KiB", "ratio", 2.0),
    ("shared path over NIXL in shared memory", "peers.json", "peers/shared_over_nixl_shm", "ratio", 1.4),
    ("ucx path over NIXL over TCP", "peers.json", "peers/ucx_over_nixl_tcp", "ratio", 5.0),
    ("ucx path over Mooncake over TCP", "peers.json", "peers/ucx_over_mooncake_tcp", "ratio", 5.0),
    ("full score over plain read, one core, G 4", "kernel_bench.json", "score/full/D128_B16_R8_G4", "ratio", 0.25),
    ("coarse score over plain read, one core, G 4", "kernel_bench.json", "score/coarse/D128_B16_R8_G4", "ratio", 0.2),
    ("ucx fetch, 2 daemons over 1, one host", "pool_bench.json", "pool/fetch/ucx/2_daemons", "ratio", None),
    ("ucx fetch, 4 daemons over 1, one host", "pool_bench.json", "pool/fetch/ucx/4_daemons", "ratio", None),
    ("drain, MB/s, one host", "pool_bench.json", "pool/drain", "value", None),
    ("owners a second, 200 members, millions", "placement_bench.json", "placement/200/equal/owner", "value", None),
    ("GPU score, 1M tokens, over plain read", "gpu_score_bench.json", "score full, 1 x 1024K tokens", "ratio", 0.9),
    ("GPU score, 8 x 128K", "gpu_kernel_bench.json", "score full, 8 x 128K tokens", "ratio", 0.85),
    ("GPU score, 32 x 32K", "gpu_kernel_bench.json", "score full, 32 x 32K tokens", "ratio", 0.85),
    ("GPU score, 1M, Hk 4 G 8", "gpu_kernel_bench.json", "score full, 1 x 1024K tokens, Hk 4 G 8", "ratio", 0.9),
    ("GPU coarse score, 4M", "gpu_kernel_bench.json", "score coarse, 1 x 4096K tokens", "ratio", 0.9),
    ("GPU score, 128K", "gpu_kernel_bench.json", "score full, 1 x 128K tokens", "ratio", 0.7),
    ("GPU coarse score, 1M", "gpu_kernel_bench.json", "score coarse, 1 x 1024K tokens", "ratio", 0.82),
    ("GPU coarse score, 8 x 128K", "gpu_kernel_bench.json", "score coarse, 8 x 128K tokens", "ratio", 0.82),
    ("GPU select, 8 rows of 65,536 pages", "gpu_select_bench.json",
     "select 8 x 65536 pages, K 126, lse in L2", "us", 10),
    ("GPU select, 32 rows of 65,536 pages", "gpu_select_bench.json",
     "select 32 x 65536 pages, K 126, lse in L2", "us", 16),
    ("GPU gather over copy, 512 x 8 KiB", "gpu_kernel_bench.json", "gather 512 units of 8 KiB, local", "ratio", 0.85),
    ("GPU gather over copy, 8,192 x 8 KiB", "gpu_kernel_bench.json", "gather 8192 units of 8 KiB, local", "ratio", 0.85),
    ("GPU attend, batch 1, us", "gpu_select_bench.json", "attend 1 x 2048 tokens", "us", 9.9),
    ("GPU attend, batch 8, us", "gpu_select_bench.json", "attend 8 x 2048 tokens", "us", 25.8),
    ("GPU attend, batch 32, us", "gpu_select_bench.json", "attend 32 x 2048 tokens", "us", 67.6),
    ("GPU summarize, E1S, million units a second", "gpu_summarize_bench.json",
     "summarize 102,400 units, E1S", "value", 20),
    *[(f"GPU step of a layer, dense over ours: {case}", "step_bench.json", f"{case}, dense over the step", "ratio", bound)
      for case, bound in (("llama 1 x 1M", 7), ("llama 1 x 256K", 4.5), ("llama 1 x 128K", 3.3), ("llama 1 x 32K", 1.9),
                          ("llama 1 x 16K", 1.3), ("llama 8 x 128K", 6), ("llama 8 x 32K", 3.5), ("hk4 1 x 1M", 5.5),
                          ("hk4 1 x 128K", 2.2))],
    *[(f"GPU step of a layer, progressive, dense over ours: {case}", "step_bench.json",
       f"{case}, dense over the step, progressive scan", "ratio", bound)
      for case, bound in (("llama 1 x 1M", 12), ("llama 1 x 4M", 22), ("llama 8 x 128K", 8))],
    *[(f"GPU step of a layer, the authors' over ours: {case}", "step_bench.json", f"{case}, authors over the step", "ratio",
       bound)
      for case, bound in (("llama 1 x 1M", 2), ("llama 1 x 256K", 2), ("llama 1 x 128K", 1.6), ("llama 1 x 32K", 1.4),
                          ("llama 1 x 16K", 1.2), ("hk4 1 x 1M", 3), ("hk4 1 x 128K", 1.6))],
    ("GPU step in a graph of 32 layers over 32 single ones: llama 1 x 128K", "step_bench.json",
     "llama 1 x 128K, step of a layer, graph of 32 over 32 single ones", "us", 1.05),
    ("step, pool over local: llama 1 x 32K", "decode_bench.json", "llama 1 x 32K, pool over local, warm", "us", 1.1),
    ("step, pool over local: llama 1 x 128K", "decode_bench.json", "llama 1 x 128K, pool over local, warm", "us", 1.1),
    ("step, pool over local: llama 1 x 512K", "decode_bench.json", "llama 1 x 512K, pool over local, warm", "us", 1.1),
    ("step, pool over local: hk4 1 x 1M", "decode_bench.json", "hk4 1 x 1M, pool over local, warm", "us", 1.1),
    ("step, pool over local: llama 4 x 128K", "decode_bench.json", "llama 4 x 128K, pool over local, warm", "us", 1.1),
    ("step, pool over local: llama 16 x 32K", "decode_bench.json", "llama 16 x 32K, pool over local, warm", "us", 1.1),
    ("dense over the step, warm: hk4 1 x 1M", "decode_bench.json", "hk4 1 x 1M, dense over pool, warm", "ratio", 8),
    ("dense over the step, warm: llama 1 x 512K", "decode_bench.json", "llama 1 x 512K, dense over pool, warm", "ratio", 7),
    ("dense over the step, warm: llama 1 x 128K", "decode_bench.json", "llama 1 x 128K, dense over pool, warm", "ratio", 3),
    ("the authors' step over ours, warm: llama 1 x 128K", "decode_bench.json",
     "llama 1 x 128K, authors over pool, warm", "ratio", None),
    ("the authors' step over ours, warm: hk4 1 x 1M", "decode_bench.json",
     "hk4 1 x 1M, authors over pool, warm", "ratio", None),
    ("GPU fetch, 128 units a layer in a graph, us", "decode_bench.json",
     "llama: fetch 128 units a layer, in a graph", "us", 6),
    ("ucx path with CUDA, NIXL READ over ours, two GPUs", "nvlink.json",
     "llama: NIXL over ucx path with CUDA, cuda_ipc: request, gather, reply, list of 512 units", "ratio", 10),
    ("ucx path over UCX's 4 MiB message, GPU memory", "ucx_messages.json",
     "llama: ucx path over UCX's own message, 4 MiB", "ratio", 0.7),
    ("ucx path over UCX's 64 MiB message", "ucx_messages.json",
     "llama: ucx path over UCX's own message, 64 MiB", "ratio", 0.7),
    ("NIXL over the peer path, 512 units", "decode_bench.json",
     "llama: NIXL over gather 512 units, list on the device", "ratio", 50),
    ("host time of a captured step, us: llama 1 x 128K", "decode_bench.json", "llama 1 x 128K, pool, warm, host", "us", 20),
    ("host time of a captured step, us: hk4 1 x 1M", "decode_bench.json", "hk4 1 x 1M, pool, warm, host", "us", 20),
    ("open 512K tokens: mirror over the HBM copy", "decode_bench.json",
     "llama: open: fill the mirror of 32768 pages", "ratio", 0.5),
    ("open 1M tokens: hash, ms", "decode_bench.json", "hk4: open: hash 65536 pages", "value", None),
    ("open 1M tokens: hash, match and lease, ms", "decode_bench.json",
     "hk4: open: hash, match and lease 65536 pages", "us", 250),
    ("worker's memory over the formula, 1M tokens", "decode_bench.json",
     "hk4 1 x 1M, worker's memory over records and cache", "us", 1.03),
    ("KV bytes, dense over sparse, 1M tokens", "nvlink.json",
     "hk4 1 x 1M, KV bytes dense over sparse", "ratio", None),
    ("NVLink: step, pool over local: llama 1 x 128K", "nvlink.json", "llama 1 x 128K, pool over local, warm", "us", 1.15),
    ("NVLink: step, pool over local: hk4 1 x 1M", "nvlink.json", "hk4 1 x 1M, pool over local, warm", "us", 1.15),
    ("NVLink: cold fetch of 256 MiB over the copy", "nvlink.json",
     "llama: fetch 128 units a head, 32 layers", "ratio", 0.9),
    ("NVLink: 512 units, list on the device, us", "nvlink.json", "llama: gather 512 units, list on the device", "us", 25),
    ("NVLink: NIXL over the peer path, 512 units", "nvlink.json",
     "llama: NIXL over gather 512 units, list on the device", "ratio", 100),
    ("NVLink: 128 units a layer in a graph, us", "nvlink.json", "llama: fetch 128 units a layer, in a graph", "us", 6),
    ("NVLink: open 1M tokens: mirror over the copy", "nvlink.json",
     "hk4: open: fill the mirror of 65536 pages", "ratio", 0.7),
    ("NVLink: 256 MiB in one list over the copy", "nvlink.json", "llama: gather 32768 units, one list on the device", "ratio",
     0.9),
    ("NVLink: ucx path with CUDA, 512 units, us", "nvlink.json",
     "llama: ucx path with CUDA, cuda_ipc: request, gather, reply, list of 512 units", "us", 120),
    ("NVLink: bulk move by NCCL over the copy", "nccl_moves.json", "bulk move of 256 MiB by NCCL, at most 16 CTAs",
     "ratio", 0.8),
]


def load(folder, name):
    path = pathlib.Path(folder) / name
    return json.loads(path.read_text()) if path.exists() else None


def main(folder):
    short = 0
    print(f"{'target':72} {'figure':>9} {'bound':>10}  {'':5} {'commit':14} machine")
    for name, file, figure, field, bound in TARGETS:
        results = load(folder, file)
        found = [f for f in results["figures"] if f["name"] == figure] if results else []
        if not found:
            short += 1
            print(f"{name:72} {'-':>9} {bound or 0:10.3f}  short no result: {folder}/{file} has no {figure}")
            continue
        if bound is None:
            value = found[0][field]
            print(f"{name:72} {value:9.3f} {'':10}  shown {results['commit']:14} {results['machine']}")
            continue
        at_most = field == "us"
        value = found[0]["value" if at_most else field]
        verdict = "ok" if (value <= bound if at_most else value >= bound) else "short"
        short += verdict == "short"
        print(f"{name:72} {value:9.3f} {'<=' if at_most else '>='}{bound:8.3f}  {verdict:5} {results['commit']:14} {results['machine']}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
