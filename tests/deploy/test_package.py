#!/usr/bin/env python3
"""The tarball, the systemd unit and the image's recipe.

usage: KVD_BUILD_DIR=build/cpu build/venv/bin/python -B tests/deploy/test_package.py
The tarball is made of the programs of KVD_BUILD_DIR. No container engine is used: what the image holds, the tarball's folder, runs in a
root that has nothing but glibc, read-only, as uid 65532 and process 1. The recipe's own steps are read here and run by
tests/deploy/build_image.py, by hand: they need a network and build everything.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import build_image
import container_root
import helm_chart
from helm_chart import BUILD, CHART, DAEMON, LOCKSCTL, ROOT

WHY_SKIPPED = "" if DAEMON.exists() and LOCKSCTL.exists() else f"no {DAEMON} or {LOCKSCTL}"
WHY_SKIPPED = WHY_SKIPPED or ("" if shutil.which("patchelf") else "no patchelf: run deploy/install_deps.sh build")
WHY_NO_ROOT = WHY_SKIPPED or container_root.why_not()
UNIT = ROOT / "deploy/systemd/locks-kvd.service"
SERVICE_CONFIG = ROOT / "deploy/systemd/locks-kvd.textproto"
SANDBOX_ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def make_tarball(out):
    subprocess.run(["bash", ROOT / "deploy/tarball.sh", f"--build-dir={BUILD}", f"--out={out}"], check=True, capture_output=True, text=True)
    archives = list(pathlib.Path(out).glob("*.tar.gz"))
    assert len(archives) == 1, archives
    return archives[0]


def setUpModule():
    global work, archive
    work = tempfile.TemporaryDirectory()
    archive = None if WHY_SKIPPED else make_tarball(work.name + "/out")


def tearDownModule():
    work.cleanup()


def unpack(to):
    subprocess.run(["tar", "-xzf", archive, "-C", to], check=True)
    folders = list(pathlib.Path(to).iterdir())
    assert len(folders) == 1, folders
    return folders[0]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def flags(control, health, metrics, socket_dir):
    return [f"--control-address=127.0.0.1:{control}", f"--health-address=127.0.0.1:{health}", f"--metrics-address=127.0.0.1:{metrics}",
            f"--socket-dir={socket_dir}"]


def wait_for(port, process, log):
    for _ in range(300):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"the daemon did not start: {log.read_text()}")


def paths_that_work(locksctl, port, environment):
    """Paths over which `locksctl selftest` fetched every page bit by bit; no other line may say that a byte was wrong."""
    done = subprocess.run([locksctl, "selftest", "--daemon", f"127.0.0.1:{port}", "--tenant", "demo", "--model", "llama-3.1-8b",
                           "--weights-id", "meta-llama/Llama-3.1-8B@main", "--rope", "theta=500000,scaling=llama3,factor=8",
                           "--max-pages", "2", "-o", "json", "--timeout", "30s"],
                          env=environment, capture_output=True, text=True, timeout=120)
    lines = json.loads(done.stdout)
    assert done.returncode == 0 and all(line["wrong"] == 0 for line in lines), done.stdout + done.stderr
    return {line["path"] for line in lines if line["result"] == "ok" and line["units"] > 0}


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class TarballTest(unittest.TestCase):
    def setUp(self):
        self.place = tempfile.TemporaryDirectory()
        self.addCleanup(self.place.cleanup)
        self.folder = unpack(self.place.name)

    def test_it_brings_all_that_it_links_but_glibc(self):
        moved = self.folder.rename(self.folder.with_name("moved elsewhere"))
        files = [*moved.glob("bin/*"), *moved.glob("lib/*.so*")]
        self.assertGreater(len(files), 10)
        for file in files:
            traced = subprocess.run(["ldd", file], env=SANDBOX_ENVIRONMENT, capture_output=True, text=True).stdout
            self.assertNotIn("not found", traced, file)
            for name, path in re.findall(r"^\s*(\S+) => (\S.*?) \(0x", traced, re.MULTILINE):
                if name not in container_root.GLIBC:
                    self.assertTrue(path.startswith(str(moved)), f"{file.name}: {name} comes from {path}")

    def test_programs_say_what_they_are(self):
        version = self.folder.name.split("-")[2]
        done = subprocess.run([self.folder / "bin/locks-kvd", "--version"], env=SANDBOX_ENVIRONMENT, capture_output=True, text=True)
        self.assertTrue(done.stdout.startswith(f"locks-kvd {version},"), done.stdout)
        for program in ("locks-kvd", "locksctl"):
            done = subprocess.run([self.folder / "bin" / program, "--help"], env=SANDBOX_ENVIRONMENT, capture_output=True, text=True)
            self.assertEqual(0, done.returncode, done.stderr)
            self.assertIn(program, done.stdout)

    def test_it_serves_with_the_example_configuration(self):
        ports = free_ports(3)
        log = pathlib.Path(self.place.name) / "log"
        with open(log, "w") as output:
            process = subprocess.Popen(
                [self.folder / "bin/locks-kvd", "--config", self.folder / "share/locks-kvd/locks-kvd.textproto",
                 *flags(*ports, f"{self.place.name}/socket")], env=SANDBOX_ENVIRONMENT, stdout=output, stderr=output)
        try:
            wait_for(ports[1], process, log)
            self.assertEqual({"shared", "ucx"}, paths_that_work(self.folder / "bin/locksctl", ports[0], SANDBOX_ENVIRONMENT))
        finally:
            process.send_signal(signal.SIGTERM)
            self.assertEqual(0, process.wait(timeout=60), log.read_text())

    def test_it_holds_no_debug_information(self):
        for file in [*self.folder.glob("bin/*"), *self.folder.glob("lib/**/*.so*")]:
            self.assertNotIn(b"\0.debug_info\0", file.read_bytes(), file.name)

    def test_each_library_has_its_package_and_licence(self):
        share = self.folder / "share/locks-kvd"
        listed = dict(line.split(" ", 1) for line in (share / "libraries.txt").read_text().splitlines())
        self.assertEqual({p.name for p in self.folder.glob("lib/*.so*")}, set(listed))
        for package in {entry.split()[0] for entry in listed.values()}:
            self.assertGreater((share / "licenses" / package).stat().st_size, 100, package)
        self.assertEqual((ROOT / "LICENSE").read_text(), (self.folder / "LICENSE").read_text())

    def test_the_same_programs_make_the_same_bytes(self):
        with tempfile.TemporaryDirectory() as again:
            self.assertEqual(archive.read_bytes(), make_tarball(again).read_bytes())

    def test_wrong_arguments_are_refused(self):
        done = subprocess.run(["bash", ROOT / "deploy/tarball.sh", "--buildir=x"], capture_output=True, text=True)
        self.assertEqual(2, done.returncode)
        self.assertIn("--buildir", done.stderr)


class SystemdTest(unittest.TestCase):
    def setUp(self):
        self.options = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))

    @unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
    def test_the_unit_waits_for_a_whole_drain(self):
        done = subprocess.run([DAEMON, "--config", SERVICE_CONFIG, "--print-config"], capture_output=True, text=True)
        self.assertEqual(0, done.returncode, done.stderr)
        drain_s = int(re.search(r"drain_ms: (\d+)", done.stdout).group(1)) / 1000
        self.assertGreaterEqual(int(self.options["TimeoutStopSec"]), drain_s + 20)

    def test_the_unit_is_hardened(self):
        for option, value in (("ProtectSystem", "strict"), ("NoNewPrivileges", "yes"), ("LimitMEMLOCK", "infinity"), ("LimitCORE", "0"),
                              ("CapabilityBoundingSet", ""), ("User", "locks-kvd"), ("ProtectHome", "yes"), ("Type", "exec")):
            self.assertEqual(value, self.options[option], option)
        self.assertIn(f"u {self.options['User']} ", (ROOT / "deploy/systemd/locks-kvd.sysusers.conf").read_text())
        # The daemon's socket is where systemd makes its directory.
        self.assertIn(f'socket_dir: "/run/{self.options["RuntimeDirectory"]}"', SERVICE_CONFIG.read_text())

    @unittest.skipUnless(shutil.which("systemd-analyze"), "no systemd-analyze")
    def test_systemd_takes_the_unit_and_finds_little_exposed(self):
        with tempfile.TemporaryDirectory() as folder:
            unit = pathlib.Path(folder) / "locks-kvd.service"
            unit.write_text(UNIT.read_text().replace("/opt/locks-kvd/bin/locks-kvd", "/bin/true"))
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--threshold=20", unit], capture_output=True, text=True)
            self.assertEqual(0, done.returncode, done.stdout[-300:])
            unit.write_text(unit.read_text().replace("LimitMEMLOCK=infinity", "LimitMEMLOCKS=infinity"))
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
            self.assertIn("LimitMEMLOCKS", done.stderr)


class ImageTest(unittest.TestCase):
    def test_the_recipe_is_complete_for_each_variant(self):
        for variant in ("cpu", "cuda"):
            for memlock in ("node", "capability"):
                stages = build_image.read_dockerfile({"VARIANT": variant, "MEMLOCK": memlock})
                names = {stage.name for stage in stages}
                for stage in stages:
                    self.assertTrue(stage.base in names or "/" in stage.base or ":" in stage.base, stage.base)
                    for step in stage.steps:
                        source = step.flags.get("from")
                        self.assertTrue(source is None or source in names, step)
                        if step.word == "COPY" and source is None:
                            for path in step.text.split()[:-1]:
                                self.assertTrue((ROOT / path).exists(), path)
                last = {step.word: step.text for step in stages[-1].steps}
                self.assertEqual("65532:65532", last["USER"])
                self.assertEqual(["locks-kvd"], json.loads(last["ENTRYPOINT"]))

    def test_an_image_without_a_stage_is_seen(self):
        stages = build_image.read_dockerfile({"VARIANT": "rocm"})
        self.assertIn("run-rocm", {s.base for s in stages} - {s.name for s in stages})

    def test_the_chart_runs_the_recipes_user(self):
        self.assertIn("65532", (CHART / "templates/_pod.tpl").read_text())
        self.assertEqual(65532, container_root.UID)

    @unittest.skipIf(WHY_NO_ROOT, WHY_NO_ROOT)
    def test_the_folder_serves_in_a_bare_read_only_root_and_drains_as_process_one(self):
        with tempfile.TemporaryDirectory() as place:
            root = pathlib.Path(place) / "root"
            container_root.make_bare_root(root)
            unpack(root / "opt").rename(root / "opt/locks-kvd")
            os.chmod(place, 0o755)
            ports = free_ports(3)
            log = pathlib.Path(place) / "log"
            with open(log, "w") as output:
                outer = container_root.start(root, ["locks-kvd", "--config", "/opt/locks-kvd/share/locks-kvd/locks-kvd.textproto",
                                                    *flags(*ports, "/run/socket")], stdout=output, stderr=output)
            try:
                wait_for(ports[1], outer, log)
                inside = container_root.first_process(outer)
                status = pathlib.Path(f"/proc/{inside}/status").read_text()
                self.assertRegex(status, r"\nUid:\t65532\t65532\t65532\t65532\n")
                self.assertRegex(status, r"\nNSpid:\t\d+\t1\n")
                self.assertRegex(status, r"\nCapEff:\t0+\n")
                # The shared path needs the socket, which is in the pod's own /run: ucx alone from out here.
                self.assertEqual({"ucx"}, paths_that_work(LOCKSCTL, ports[0], dict(os.environ)))
                client = container_root.start(root, ["locksctl", "status", "--daemon", f"127.0.0.1:{ports[0]}"], stdout=subprocess.PIPE)
                self.assertIn(b"incarnation", client.communicate(timeout=60)[0].lower())
                os.kill(inside, signal.SIGTERM)
                self.assertEqual(0, outer.wait(timeout=60), log.read_text())
                self.assertIn("drain_end", log.read_text())
            finally:
                if outer.poll() is None:
                    outer.kill()
                    outer.wait()


if __name__ == "__main__":
    helm_chart.main()
