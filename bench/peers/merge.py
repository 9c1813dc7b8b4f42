"""Puts the rounds of bench/peers.sh together: medians, and our paths over each peer.

usage: merge.py FOLDER OUT.json
A ratio is the median of the rounds' ratios: both of its sides met the same disturbance.
"""

import importlib.metadata
import json
import pathlib
import statistics
import sys

UNITS = "512x8KiB"
RATIOS = [("shared", "nixl_shm"), ("shared", "nixl_shm_unguarded"), ("ucx", "nixl_tcp"), ("ucx", "mooncake_tcp")]
WHEELS = ["nixl-cu13", "mooncake-transfer-engine-non-cuda"]


def figure(name, values, unit, is_ratio):
    median = statistics.median(values)
    return dict(name=name, value=median, unit=unit, limit=0, ratio=median if is_ratio else 0, lowest=min(values),
                highest=max(values))


def main(folder, out):
    rounds, checks, ours = [], [], None
    for path in sorted(pathlib.Path(folder).glob("fetch_bench.*.json")):
        number = path.name.split(".")[1]
        ours = json.loads(path.read_text())
        rates = {f["name"].split("/")[1]: f["value"] for f in ours["figures"] if f["unit"] == "GB/s"}
        checks += [dict(check, name=f"round {number}: {check['name']}") for check in ours["checks"]]
        for line in sorted(pathlib.Path(folder).glob(f"peer.*.{number}.json")):
            peer = json.loads(line.read_text())
            rates[peer["name"]] = peer["gb_per_s"]
            checks.append(dict(name=f"round {number}: every byte that {peer['name']} brought", ok=peer["wrong"] == 0,
                               detail=f"{peer['wrong']} wrong of {peer['checked']} units"))
        rounds.append(rates)
    names = ["memcpy"] + list(dict.fromkeys(name for pair in RATIOS for name in pair))
    figures = [figure(f"peers/{name}/{UNITS}", [r[name] for r in rounds], "GB/s", False) for name in names]
    for mine, peer in RATIOS:
        figures.append(figure(f"peers/{mine}_over_{peer}", [r[mine] / r[peer] for r in rounds], "times", True))
    merged = dict(bench="peers", commit=ours["commit"], machine=ours["machine"], date=ours["date"], rounds=len(rounds),
                  peers={wheel: importlib.metadata.version(wheel) for wheel in WHEELS}, figures=figures, checks=checks)

    print(f"peers  commit {ours['commit']}  machine {ours['machine']}  {len(rounds)} rounds")
    print(f"{'figure':40} {'median':>9} {'lowest':>9} {'highest':>9}")
    for f in figures:
        print(f"{f['name']:40} {f['value']:9.3f} {f['lowest']:9.3f} {f['highest']:9.3f} {f['unit']}")
    failed = [check for check in checks if not check["ok"]]
    for check in failed:
        print(f"CHECK FAILED: {check['name']}: {check['detail']}")
    if failed:
        return 1
    pathlib.Path(out).write_text(json.dumps(merged, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
