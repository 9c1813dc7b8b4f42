#!/usr/bin/env python3
"""A pool of the Helm chart as its pods would see it: names, SRV records, certificates, a drain that gives the pages away.

usage: KVD_BUILD_DIR=build/cpu build/venv/bin/python -B tests/deploy/test_chart_pool.py
Two daemons with the rendered configuration, flags and environment of two pods. The cluster's part is played in a network and a mount
namespace of the test's own: each pod's address is one of 127.0.0.0/8, a DNS server answers as Kubernetes' does for the headless Service,
and the hosts file has the lines that kubelets write. Needs root.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

import helm_chart
from helm_chart import LOCKSCTL, daemon_container, environment_of, expanded, find, render
from test_chart_daemon import SMALL_ARENA, WHY_SKIPPED, config_of, make_certificates, running

MEMBERS = "pool-locks-kvd-members.kv.svc.cluster.local"
PODS = {f"pool-locks-kvd-{i}": f"127.0.0.{i + 2}" for i in range(2)}
INSIDE = "KVD_INSIDE_NAMESPACES"
A, AAAA, SRV = 1, 28, 33


def encode(name):
    return b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"


def answer(query):
    """The reply to a DNS query: SRV of the port `control`, A of the pods, no such name for all else."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1:at + 1 + query[at]].decode().lower())
        at += 1 + query[at]
    name, kind = ".".join(labels), struct.unpack(">H", query[at + 1:at + 3])[0]
    pods = {f"{pod}.{MEMBERS}": address for pod, address in PODS.items()}
    records = []
    if name == f"_control._tcp.{MEMBERS}" and kind == SRV:
        records = [struct.pack(">HHH", 0, 50, 7411) + encode(pod) for pod in pods]
    elif name in pods and kind == A:
        records = [socket.inet_aton(pods[name])]
    known = records or name in pods
    header = query[:2] + struct.pack(">HHHHH", 0x8580 if known else 0x8583, 1, len(records), 0, 0)
    body = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 5, len(r)) + r for r in records)
    return header + query[12:at + 5] + body


def serve_dns(server):
    while True:
        query, peer = server.recvfrom(512)
        server.sendto(answer(query), peer)


def enter(folder):
    """Makes the namespaces, which are new, look like a pod's."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    lines = "".join(f"{address}\t{pod}.{MEMBERS}\t{pod}\n" for pod, address in PODS.items())
    for file, text in (("hosts", "127.0.0.1\tlocalhost\n" + lines), ("resolv.conf", "nameserver 127.0.0.1\noptions ndots:5\n")):
        (folder / file).write_text(text)
        subprocess.run(["mount", "--bind", folder / file, f"/etc/{file}"], check=True)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    threading.Thread(target=serve_dns, args=(server,), daemon=True).start()


def events(log, name):
    return [line for line in map(json.loads, filter(None, log.read_text().splitlines())) if line["event"] == name]


def wait_for_event(log, name, **fields):
    for _ in range(300):
        found = [e for e in events(log, name) if fields.items() <= e.items()]
        if found:
            return found[-1]
        time.sleep(0.1)
    raise AssertionError(f"expected {name} {fields}: {log.read_text()}")


def sealed_pages(address):
    page = urllib.request.urlopen(f"http://{address}:7413/metrics", timeout=10).read().decode()
    return sum(float(v) for v in re.findall(r'^locks_kvd_slots\{.*state="sealed".*\} (\S+)$', page, re.MULTILINE))


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class PoolTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.addClassCleanup(cls.stack.close)
        cls.folder = pathlib.Path(cls.stack.enter_context(tempfile.TemporaryDirectory()))
        enter(cls.folder)
        make_certificates(cls.folder)
        cls.objects = render("cpu", values=json.dumps({"arenas": [SMALL_ARENA], "data": {"devices": "lo"}}))

    def pod(self, name):
        """A daemon as the pod `name` of the StatefulSet, with what is every pod's own address in a cluster."""
        container = daemon_container(self.objects)
        environment = environment_of(container, name)
        arguments = [expanded(a, environment) for a in container["args"] if not a.startswith("--config=")]
        arguments += [f"--health-address={PODS[name]}:7412", f"--metrics-address={PODS[name]}:7413"]
        return running(config_of(self.objects).replace("/etc/locks-kvd/tls", str(self.folder / "daemon")), arguments)

    def locksctl(self, *arguments):
        context = self.folder / "context.textproto"
        text = find(self.objects, "ConfigMap", "-client")["data"]["context.textproto"]
        context.write_text(text.replace("/etc/locks-kvd/tls", str(self.folder / "client")))
        done = subprocess.run([LOCKSCTL, *arguments, "--context", context, "-o", "json"], capture_output=True, text=True, timeout=120)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return json.loads(done.stdout)

    def test_daemons_find_each_other_serve_workers_and_hand_over(self):
        first, second = PODS
        with self.pod(second) as second_log:
            with self.pod(first) as first_log:
                for name, log in ((first, first_log), (second, second_log)):
                    known = wait_for_event(log, "members_known", members="2")
                    self.assertEqual((f"{name}.{MEMBERS}:7411", "true"), (known["self"], known["member"]))
                self.assertEqual({"ok"}, {line["result"] for line in self.locksctl("selftest") if line["path"] == "ucx"})
                before = sealed_pages(PODS[first]), sealed_pages(PODS[second])
                self.assertTrue(all(before), before)
                os.link(first_log, self.folder / "first.log")  # which outlives the daemon's own folder
            # The first pod was stopped, ended with exit code 0, and its pages are here.
            moved = events(self.folder / "first.log", "drain_moved")[0]
            self.assertEqual((int(before[0]), 0), (int(moved["pages"]), int(moved["left"])), moved)
            self.assertEqual(sum(before), sealed_pages(PODS[second]))


def main():
    if os.environ.get(INSIDE):
        helm_chart.main()
    why = "" if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip") else "expected root, unshare and ip"
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not why and subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        why = "no namespaces here"
    if why:
        print(f"SKIPPED: {why}")
        return 0
    return subprocess.run([*command, sys.executable, "-B", __file__, *sys.argv[1:]], env={**os.environ, INSIDE: "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
