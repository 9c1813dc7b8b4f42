"""Judges the project's speed targets against a folder of results. Called by bench/targets.sh."""

import json
import pathlib
import sys

# name, results file, figure, what is compared: "ratio" or "value" at least the bound, or "us", which is a value of at
# most the bound; bound None: shown, nothing is promised
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
    ("GPU score, 1M tokens, over plain read", "gpu_kernel_bench.json", "score full, 1 x 1024K tokens", "ratio", 0.9),
    ("GPU score, 8 x 128K", "gpu_kernel_bench.json", "score full, 8 x 128K tokens", "ratio", 0.85),
    ("GPU score, 32 x 32K", "gpu_kernel_bench.json", "score full, 32 x 32K tokens", "ratio", 0.85),
    ("GPU score, 1M, Hk 4 G 8", "gpu_kernel_bench.json", "score full, 1 x 1024K tokens, Hk 4 G 8", "ratio", 0.9),
    ("GPU coarse score, 4M", "gpu_kernel_bench.json", "score coarse, 1 x 4096K tokens", "ratio", 0.9),
    ("GPU score, 128K", "gpu_kernel_bench.json", "score full, 1 x 128K tokens", "ratio", 0.7),
    ("GPU coarse score, 1M", "gpu_kernel_bench.json", "score coarse, 1 x 1024K tokens", "ratio", 0.82),
    ("GPU coarse score, 8 x 128K", "gpu_kernel_bench.json", "score coarse, 8 x 128K tokens", "ratio", 0.82),
    ("GPU select, 8 rows of 65,536 pages", "gpu_kernel_bench.json",
     "select 8 x 65536 pages, K 126, lse in L2", "us", 10),
    ("GPU select, 32 rows of 65,536 pages", "gpu_kernel_bench.json",
     "select 32 x 65536 pages, K 126, lse in L2", "us", 16),
    ("GPU gather over copy, 512 x 8 KiB", "gpu_kernel_bench.json", "gather 512 units of 8 KiB, local", "ratio", 0.85),
    ("GPU gather over copy, 8,192 x 8 KiB", "gpu_kernel_bench.json", "gather 8192 units of 8 KiB, local", "ratio", 0.85),
    ("GPU summarize, E1S, million units a second", "gpu_kernel_bench.json",
     "summarize 102,400 units, E1S", "value", 20),
]


def load(folder, name):
    path = pathlib.Path(folder) / name
    return json.loads(path.read_text()) if path.exists() else None


def main(folder):
    short = 0
    print(f"{'target':50} {'figure':>9} {'bound':>10}  {'':5} {'commit':14} machine")
    for name, file, figure, field, bound in TARGETS:
        results = load(folder, file)
        found = [f for f in results["figures"] if f["name"] == figure] if results else []
        if not found:
            short += 1
            print(f"{name:50} {'-':>9} {bound or 0:10.3f}  short no result: {folder}/{file} has no {figure}")
            continue
        if bound is None:
            value = found[0][field]
            print(f"{name:50} {value:9.3f} {'':10}  shown {results['commit']:14} {results['machine']}")
            continue
        at_most = field == "us"
        value = found[0]["value" if at_most else field]
        verdict = "ok" if (value <= bound if at_most else value >= bound) else "short"
        short += verdict == "short"
        print(f"{name:50} {value:9.3f} {'<=' if at_most else '>='}{bound:8.3f}  {verdict:5} {results['commit']:14} {results['machine']}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
