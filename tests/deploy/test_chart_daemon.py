#!/usr/bin/env python3
"""The Helm chart and the real daemon: it takes each rendered configuration, and passes what `helm test` runs.

usage: KVD_BUILD_DIR=build/cpu build/venv/bin/python -B tests/deploy/test_chart_daemon.py
The scripts of the test pods run here, against a daemon with the rendered configuration, the certificates of `locksctl certs dev`, and
localhost in place of the cluster's names. Probes, networks and DNS of a cluster are not run.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
import unittest

import helm_chart
from helm_chart import DAEMON, LOCKSCTL, PROFILES, daemon_container, environment_of, expanded, find, render

WHY_SKIPPED = helm_chart.missing_tools() or ("" if DAEMON.exists() and LOCKSCTL.exists() else f"no {DAEMON} or {LOCKSCTL}")

SMALL_ARENA = {
    "tenant": "demo", "model": "small", "size": "64Mi", "identity": {"weightsId": "w"},
    "geometry": {"numLayers": 2, "numQHeads": 4, "numKvHeads": 2, "headDim": 64, "softmaxScale": 0.125}}


def config_of(objects):
    return find(objects, "ConfigMap")["data"]["config.json"]


def print_config(text, arguments=()):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        return subprocess.run([DAEMON, "--config", file.name, *arguments, "--print-config"], capture_output=True, text=True, timeout=30)


def pod_arguments(objects):
    container = daemon_container(objects)
    environment = environment_of(container, "pool-locks-kvd-0")
    return [expanded(a, environment) for a in container["args"] if not a.startswith("--config=")]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def make_certificates(folder):
    """As README.md of the chart says; for the daemon and the client a folder with the keys of its secret."""
    subprocess.run([LOCKSCTL, "certs", "dev", "--out", folder / "certs", "--tenant", "demo", "--host",
                    "*.pool-locks-kvd-members.kv.svc.cluster.local"], check=True, capture_output=True)
    for secret, name in (("daemon", "server"), ("client", "client")):
        (folder / secret).mkdir()
        for key, file in (("tls.crt", f"{name}.pem"), ("tls.key", f"{name}.key"), ("ca.crt", "ca.pem")):
            shutil.copy(folder / "certs" / file, folder / secret / key)


@contextlib.contextmanager
def running(config_text, arguments):
    """A daemon until the end of the `with`; it must end with exit code 0 when told to stop."""
    with tempfile.TemporaryDirectory() as folder:
        config, ready, log = (pathlib.Path(folder) / name for name in ("config.json", "ready", "log"))
        config.write_text(config_text)
        with open(log, "w") as output:
            process = subprocess.Popen([DAEMON, "--config", config, *arguments, "--ready-file", ready], stdout=output, stderr=output)
        try:
            for _ in range(300):
                if ready.exists() or process.poll() is not None:
                    break
                time.sleep(0.1)
            if not ready.exists():
                raise AssertionError(f"the daemon did not start: {log.read_text()}")
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        if code != 0:
            raise AssertionError(f"expected exit code 0 after SIGTERM, got {code}: {log.read_text()}")


def local_values(**more):
    first = random.randint(20000, 30000)
    ports = {"control": free_port(), "health": free_port(), "metrics": free_port(), "dataFirst": first, "dataLast": first + 50}
    return {"arenas": [SMALL_ARENA], "ports": ports, "data": {"devices": "lo"},
            "cluster": {"enabled": False}, **more}


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class ConfigurationTest(unittest.TestCase):
    def test_the_daemon_takes_the_configuration_of_each_profile(self):
        variants = [(profile, ()) for profile in PROFILES] + [
            ("cpu", ("tls.enabled=false", "insecureAllow=true")), ("cpu", ("cluster.enabled=false",)),
            ("cpu", ("cluster.copies=2", "cluster.rebalance=false", "cluster.moveBytesPerSecond=2000000000", "cluster.nccl=true")),
            ("cpu", ("times.heartbeatMs=500", "times.quarantineMs=9000", "limits.fetchBytesInFlightPerSession=1073741824")),
            ("cpu", ("arenas[0].geometry.dtype=DTYPE_FP16", "arenas[0].geometry.rank=4", "arenas[0].queryMetric.configMap=q",
                     "arenas[0].queryMetric.key=k")),
            ("rdma", ("data.transports=ib", "log.format=text"))]
        for profile, sets in variants:
            with self.subTest(profile=profile, sets=sets):
                objects = render(profile, sets)
                done = print_config(config_of(objects), pod_arguments(objects))
                if "built without CUDA" in done.stderr:
                    # All that this daemon has against it: the rest is read as if the arenas were in host memory.
                    self.assertEqual("gpu", profile)
                    self.assertEqual(1, len([line for line in done.stderr.splitlines() if "arenas[" in line]), done.stderr)
                    config = json.loads(config_of(objects))
                    for arena in config["arenas"]:
                        self.assertEqual(0, arena.pop("gpu"))
                    done = print_config(json.dumps(config), pod_arguments(objects))
                self.assertEqual(0, done.returncode, done.stderr)
                for arena in json.loads(config_of(objects))["arenas"]:
                    self.assertIn(f"bytes: {arena['bytes']}\n", done.stdout)
                self.assertIn("drain_ms: 60000\n", done.stdout)

    def test_a_pool_daemon_takes_its_name_from_its_pod(self):
        objects = render()
        done = print_config(config_of(objects), pod_arguments(objects))
        self.assertIn('address: "pool-locks-kvd-0.pool-locks-kvd-members.kv.svc.cluster.local:7411"', done.stdout)

    def test_only_the_sidecar_may_serve_without_certificates(self):
        config = json.loads(config_of(render("sidecar")))
        self.assertNotIn("tls", config["control"])
        self.assertEqual(0, print_config(json.dumps(config)).returncode)
        config["control"]["address"] = "0.0.0.0:7411"
        self.assertEqual(2, print_config(json.dumps(config)).returncode)

    def test_a_field_that_the_daemon_does_not_know_is_refused(self):
        config = json.loads(config_of(render()))
        config["arenas"][0]["size"] = "4Gi"
        done = print_config(json.dumps(config))
        self.assertEqual(2, done.returncode)
        self.assertIn("size", done.stderr)

    def test_the_memory_limit_follows_the_daemons_own_count_of_slots(self):
        geometries = (
            {"numLayers": 1, "numQHeads": 1, "numKvHeads": 1, "headDim": 64, "softmaxScale": 0.125},
            {"numLayers": 3, "numQHeads": 8, "numKvHeads": 4, "headDim": 96, "rank": 4, "pageTokens": 32, "softmaxScale": 0.1},
            {"numLayers": 2, "numQHeads": 16, "numKvHeads": 8, "numShards": 4, "headDim": 256, "softmaxScale": 0.0625})
        for geometry in geometries:
            with self.subTest(geometry=geometry):
                arena = {**SMALL_ARENA, "size": "4Gi", "geometry": geometry}
                values = local_values(arenas=[arena], tls={"enabled": False}, insecureAllow=True)
                objects = render("cpu", values=json.dumps(values))
                limit = daemon_container(objects)["resources"]["limits"]["memory"]
                with running(config_of(objects), [f"--control-address=localhost:{values['ports']['control']}"]) as log:
                    slots = int(re.search(r'"slots":"(\d+)"', log.read_text()).group(1)) + 1  # the canary's
                needed = (4 << 30) * (1 + 1 / 512) + 256 * slots + (64 << 20) + (2 << 30)
                # Rounded up to MiB; the chart does not cut the arena into slabs, which may cost a few slots.
                self.assertLess(abs(int(limit.removesuffix("Mi")) - needed / 2**20 - 0.5), 0.51)


def run_test_pod(objects, name, folder, port, change=lambda text: text, **environment):
    """Exit code and output of a test pod's script, changed by `change`, against the daemon on `port`. Programs in folder/bin come
    first, the client's certificates are in folder/client."""
    container = find(objects, "Pod", f"-test-{name}")["spec"]["containers"][0]
    script = container["args"][0].replace("/etc/locks-kvd/tls", str(folder / "client"))
    script = script.replace("pool-locks-kvd-members.kv.svc.cluster.local", "localhost")
    values = {**environment_of(container, "test"), "LOCKSCTL_DAEMONS": f"localhost:{port}",
              "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment}
    done = subprocess.run([*container["command"], change(script)], env=values, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class HelmTestPodsTest(unittest.TestCase):
    """A daemon with mTLS and the rendered configuration; each test pod's script against it."""

    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.folder = pathlib.Path(cls.stack.enter_context(tempfile.TemporaryDirectory()))
        make_certificates(cls.folder)
        tools = cls.folder / "bin"
        tools.mkdir()
        (tools / "locksctl").symlink_to(LOCKSCTL)
        values = local_values(arenas=[SMALL_ARENA, {**SMALL_ARENA, "tenant": "other"}])
        cls.port = values["ports"]["control"]
        cls.objects = render("cpu", values=json.dumps(values))
        config = config_of(cls.objects).replace("/etc/locks-kvd/tls", str(cls.folder / "daemon"))
        cls.stack.enter_context(running(config, [f"--control-address=localhost:{cls.port}"]))

    @classmethod
    def tearDownClass(cls):
        cls.stack.close()

    def run_pod(self, name, change=lambda text: text, **environment):
        return run_test_pod(self.objects, name, self.folder, self.port, change, **environment)

    def test_selftest_passes_and_fails_for_another_model(self):
        code, text = self.run_pod("selftest")
        self.assertEqual(0, code, text)
        self.assertNotEqual(0, self.run_pod("selftest", WEIGHTS_ID="others")[0])

    def test_strangers_are_refused_and_the_pod_says_if_they_are_not(self):
        code, text = self.run_pod("refused")
        self.assertEqual(0, code, text)
        # A refusal that does not come fails the pod: here what is to be refused is allowed.
        for refused, allowed in (("must_fail unreachable locksctl status", 'must_fail unreachable locksctl status "${tls[@]}"'),
                                 ("--tenant 'other' --model 'small' --weights-id w --rope r", "--tenant demo --model small --weights-id w --rope ''"),
                                 ("must_fail role locksctl config", "must_fail role locksctl status")):
            code, text = self.run_pod("refused", lambda script: script.replace(refused, allowed))
            self.assertNotEqual(0, code, refused)
            self.assertIn("expected a refusal, got success", text)

    def test_the_trials_certificate_names_the_pods(self):
        text = subprocess.run(["openssl", "x509", "-in", self.folder / "daemon/tls.crt", "-noout", "-checkhost",
                               "pool-locks-kvd-1.pool-locks-kvd-members.kv.svc.cluster.local"], capture_output=True, text=True).stdout
        self.assertIn("does match", text)

    def test_the_list_of_metrics_is_the_daemons_own(self):
        done = subprocess.run([DAEMON, "--list-metrics"], capture_output=True, text=True)
        names = re.findall(r"^\| `(\w+)`", done.stdout, re.MULTILINE)
        listed = (helm_chart.CHART / "files" / "metrics.txt").read_text().split()
        self.assertEqual(sorted(names), listed, "locks-kvd --list-metrics | grep -oP '^\\| `\\K\\w+' | LC_ALL=C sort >files/metrics.txt")

    def test_all_metrics_of_the_list_are_served(self):
        code, text = self.run_pod("metrics")
        self.assertEqual(0, code, text)
        code, text = self.run_pod("metrics", lambda script: script.replace("locks_kvd_leases ", "locks_kvd_no_such_metric "))
        self.assertNotEqual(0, code)
        self.assertIn("missing: locks_kvd_no_such_metric", text)

    def test_members_are_counted(self):
        # `getent ahosts` names each address three times, one a socket type.
        for addresses, expected in ((1, 1), (2, 0)):
            lines = "".join(f"10.0.0.{i} {kind} x\n" for i in range(addresses) for kind in ("STREAM", "DGRAM", "RAW"))
            getent = self.folder / "bin" / "getent"
            getent.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
            getent.chmod(0o755)
            code, text = self.run_pod("members")
            self.assertEqual(expected, code, text)
        self.assertEqual(3, self.run_pod("members", LOCKSCTL_DAEMONS=f"localhost:{free_port()}")[0])

    def test_locksctl_takes_the_clients_context(self):
        text = find(self.objects, "ConfigMap", "-client")["data"]["context.textproto"]
        context = self.folder / "context.textproto"
        context.write_text(text.replace("/etc/locks-kvd/tls", str(self.folder / "client")))
        done = subprocess.run([LOCKSCTL, "paths", "--context", context, "--daemon", f"localhost:{self.port}"], capture_output=True, text=True)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class WithoutCertificatesTest(unittest.TestCase):
    def test_the_test_pods_pass_too_but_none_claims_refusals(self):
        values = local_values(tls={"enabled": False}, insecureAllow=True)
        objects = render("cpu", values=json.dumps(values))
        self.assertNotIn("pool-locks-kvd-test-refused", [o["metadata"]["name"] for o in objects])
        port = values["ports"]["control"]
        with tempfile.TemporaryDirectory() as place, running(config_of(objects), [f"--control-address=localhost:{port}"]):
            folder = pathlib.Path(place)
            (folder / "bin").mkdir()
            (folder / "bin" / "locksctl").symlink_to(LOCKSCTL)
            for name in ("selftest", "metrics"):
                code, text = run_test_pod(objects, name, folder, port)
                self.assertEqual(0, code, text)


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class SidecarTest(unittest.TestCase):
    def test_the_socket_is_closed_to_other_users_of_the_pod(self):
        values = local_values()
        config = config_of(render("sidecar", values=json.dumps(values)))
        with tempfile.TemporaryDirectory() as shared:
            os.chmod(shared, 0o777)  # as an emptyDir
            with running(config.replace("/run/locks-kvd", shared), []):
                path = f"{shared}/socket/locks-kvd-{values['ports']['control']}.sock"
                self.assertEqual(0o750, stat.S_IMODE(os.stat(f"{shared}/socket").st_mode))
                self.assertEqual(0o660, stat.S_IMODE(os.stat(path).st_mode))


if __name__ == "__main__":
    helm_chart.main()
