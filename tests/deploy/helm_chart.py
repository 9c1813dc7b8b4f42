"""Renders the chart of deploy/helm/locks-kvd, for the tests of this folder."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "locks-kvd"
BUILD = pathlib.Path(os.environ.get("KVD_BUILD_DIR", ROOT / "build" / "cpu"))
DAEMON = BUILD / "service" / "locks-kvd"
LOCKSCTL = BUILD / "client" / "locksctl"
HELMS = {name: ROOT / "build" / "tools" / name for name in ("helm3", "helm4")}
PROFILES = ("cpu", "gpu", "rdma", "node", "sidecar")
CRDS = ("monitoring.coreos.com/v1", "cert-manager.io/v1")


def missing_tools():
    """Why the chart cannot be rendered here; empty if it can."""
    missing = [str(path) for path in HELMS.values() if not path.exists()]
    return f"no {', '.join(missing)}: run deploy/install_deps.sh deploy" if missing else ""


def run_helm(helm, *arguments, input=""):
    return subprocess.run([HELMS[helm], *arguments], input=input, capture_output=True, text=True, timeout=60)


def values_of(profile):
    return ["-f", str(CHART / f"values-{profile}.yaml")] if profile else []


@functools.lru_cache(maxsize=None)
def render(profile="cpu", sets=(), helm="helm4", kubernetes="1.36.0", crds=False, chart=CHART, values=""):
    """The objects of the release `pool` in the namespace `kv`. `sets`: arguments of --set; `values`: text of one more file of
    values. Raises RuntimeError with helm's words if it fails."""
    arguments = ["template", "pool", str(chart), "-n", "kv", "--kube-version", kubernetes, *values_of(profile), "-f", "-"]
    for value in sets:
        arguments += ["--set", value]
    for api in CRDS if crds else ():
        arguments += ["--api-versions", api]
    done = run_helm(helm, *arguments, input=values)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def find(objects, kind, suffix=""):
    """The one object of `kind` whose name ends with `suffix`; without one, the daemon's own."""
    named = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == "pool-locks-kvd" + suffix]
    assert len(named) == 1, f"expected one {kind} pool-locks-kvd{suffix}, got {len(named)}"
    return named[0]


def pod_specs(objects):
    """Specs of all pods that the objects make, by the name of the object."""
    specs = {}
    for o in objects:
        if o["kind"] == "Pod":
            specs[o["metadata"]["name"]] = o["spec"]
        elif o["kind"] in ("StatefulSet", "DaemonSet"):
            specs[o["metadata"]["name"]] = o["spec"]["template"]["spec"]
    return specs


def at(value, path):
    """The value at a path like spec.ports[control].port or containers[0].args; [x] is an index or an item's name."""
    for step in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        if not step.startswith("["):
            value = value[step]
        elif step[1:-1].isdigit():
            value = value[int(step[1:-1])]
        else:
            value = next(item for item in value if item.get("name") == step[1:-1])
    return value


def daemon_container(objects):
    spec = next(iter(pod_specs(o for o in objects if o["kind"] != "Pod").values()))
    return next(c for c in spec.get("initContainers", []) + spec["containers"] if c["name"] == "locks-kvd")


def expanded(text, environment):
    """Kubernetes' $(NAME) in arguments and values."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match.group(1)], text)


def environment_of(container, pod_name):
    environment = {}
    for entry in container.get("env", []):
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        assert field in (None, "metadata.name"), f"this test knows only metadata.name, not {field}"
        environment[entry["name"]] = pod_name if field else expanded(entry["value"], environment)
    return environment


def main():
    """unittest.main(), which also says what was skipped and why."""
    result = unittest.main(exit=False).result
    for why in sorted({why for _, why in result.skipped}):
        print(f"SKIPPED {sum(1 for _, other in result.skipped if other == why)} tests: {why}")
    sys.exit(0 if result.wasSuccessful() else 1)
