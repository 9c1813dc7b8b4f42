"""One table of the parts that bench/gpu.sh ran: figures, what they are compared with, checks.

usage: gpu_table.py FOLDER      FOLDER/step.json (step_bench), llama.json, hk4.json (decode_bench), peers.jsonl, tests.txt,
                                nccl_communicator_test.log -> FOLDER/step_bench.json, FOLDER/decode_bench.json
A part that did not run is said, not made up. Exits 1 if a check failed.
"""

import json
import pathlib
import re
import sys


def parts_of(folder, names):
    for name in names:
        path = folder / name
        if path.exists():
            part = json.loads(path.read_text())
            if name == "cuda_ucx.json":  # the same run with another UCX: what only that one has
                part["figures"] = [f for f in part["figures"] if "ucx path with CUDA" in f["name"]]
            yield part
        else:
            print(f"gpu_table: {name}: not run")


def peers_of(folder):
    path = folder / "peers.jsonl"
    if not path.exists():
        print("gpu_table: peers: not run")
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


def figure(name, value, unit, limit=0, ratio=0):
    return dict(name=name, value=value, unit=unit, limit=limit, ratio=ratio)


def layers_compared(values, peers):
    """Ratios of a peer's time of one layer to that of step_bench."""
    figures = []
    for name, peer in peers.items():
        who, _, case = name.partition("/")
        ours = [(scan, values.get(f"{case}, step of a layer{scan}")) for scan in ("", ", full scan", ", progressive scan")]
        if who not in ("dense", "authors") or ours[0][1] is None:
            continue
        figures.append(figure(f"{case}, {who}, a layer", peer["us"], "us"))
        for scan, us in ours:
            if us:
                figures.append(figure(f"{case}, {who} over the step{scan}", peer["us"] / us, "times", 1, peer["us"] / us))
    return figures


def compared(values, peers):
    """Ratios of a peer's time of a step to decode_bench's, and of fetches."""
    figures = []
    for name, peer in peers.items():
        who, _, case = name.partition("/")
        if who in ("dense", "authors"):
            whole = peer["us"] * peer["layers"]
            figures.append(figure(f"{case}, {who}, all layers", whole, "us"))
            for way in ("warm", "drifting"):
                ours = values.get(f"{case}, pool, {way}, step")
                if ours:
                    figures.append(figure(f"{case}, {who} over pool, {way}", whole / ours, "times", 1, whole / ours))
    nixl = peers.get("nixl")
    if nixl:
        figures.append(figure("NIXL READ, 512 units", nixl["us"], "us"))
        for shape in ("llama", "hk4"):
            for what in ("gather 512 units, list on the device", "peer path, list of 512 units from the host",
                         "ucx path to the GPU, list of 512 units",
                         "ucx path with CUDA, cuda_ipc: request, gather, reply, list of 512 units"):
                ours = values.get(f"{shape}: {what}")
                if ours:
                    figures.append(figure(f"{shape}: NIXL over {what}", nixl["us"] / ours, "times", 1, nixl["us"] / ours))
    for mib, units in ((4, 512), (64, 8192)):
        own = peers.get(f"ucx_am/{mib}MiB")
        ours = values.get(f"llama: ucx path to the GPU, rate, {units} units")
        if own:
            figures.append(figure(f"UCX's own active message, {mib} MiB, GPU memories over TCP", own["gb_per_s"], "GB/s"))
        if own and ours:
            figures.append(figure(f"llama: ucx path over UCX's own message, {mib} MiB", ours / own["gb_per_s"], "times", 1, ours / own["gb_per_s"]))
    return figures


def bulk_moves(folder):
    """The rate that nccl_communicator_test printed, between two GPUs."""
    log = folder / "nccl_communicator_test.log"
    found = re.search(r"^bulk move of 256 MiB by NCCL.*: ([\d.]+), ([\d.]+)$", log.read_text(), re.M) if log.exists() else None
    return [figure("bulk move of 256 MiB by NCCL", float(found[1]), "GB/s", 0, float(found[2]))] if found else []


def merged(bench, parts, figures, checks, peers):
    head = parts[0] if parts else dict(commit="unknown", machine="unknown", date="unknown")
    print(f"{bench}  commit {head['commit']}  machine {head['machine']}")
    print(f"{'figure':76} {'value':>12} {'unit':6} {'limit':>12} {'ratio':>8}")
    for f in figures:
        limit = f"{f['limit']:12.3f}" if f["limit"] else " " * 12
        ratio = f"{f['ratio']:8.3f}" if f["ratio"] else ""
        print(f"{f['name']:76} {f['value']:12.3f} {f['unit']:6} {limit} {ratio}")
    return dict(bench=bench, commit=head["commit"], machine=head["machine"], date=head["date"], figures=figures,
                checks=checks, peers={name: peer.get("who", "") for name, peer in peers.items()})


def main(folder):
    folder = pathlib.Path(folder)
    peers = peers_of(folder)
    failed = []
    for bench, names, compare in (
        ("step_bench", ["step.json"], layers_compared),
        ("decode_bench", ["llama.json", "hk4.json", "cuda_ucx.json"], compared),
    ):
        parts = list(parts_of(folder, names))
        if not parts:
            continue
        figures = [f for part in parts for f in part["figures"]]
        checks = [c for part in parts for c in part["checks"]]
        figures += compare({f["name"]: f["value"] for f in figures}, peers)
        if bench == "decode_bench":
            figures += bulk_moves(folder)
        if bench == "decode_bench" and "nixl" in peers:
            wrong = peers["nixl"]["wrong"]
            checks.append(dict(name="every byte that NIXL brought", ok=wrong == 0, detail=f"{wrong} wrong"))
        result = merged(bench, parts, figures, checks, peers)
        (folder / f"{bench}.json").write_text(json.dumps(result, indent=1) + "\n")
        failed += [check for check in checks if not check["ok"]]
    tests = folder / "tests.txt"
    print(tests.read_text() if tests.exists() else "gpu_table: tests: not run")
    for check in failed:
        print(f"CHECK FAILED: {check['name']}: {check['detail']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
