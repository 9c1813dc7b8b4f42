#!/usr/bin/env python3
"""deploy/docs: the operator's guide is run, the client guide's CMake is configured, quoted messages exist.

usage: KVD_BUILD_DIR=build/cpu build/venv/bin/python -B tests/deploy/test_guide.py
The guide runs against a tarball of the programs of KVD_BUILD_DIR, in a new folder, with an empty environment: PATH is the tarball's bin
(which the guide itself sets) and /usr/bin:/bin. It is not a root of its own: tests/deploy/guide_root.sh runs it in one. That the
tarball brings all that it links is test_package.py's. KVD_TARBALL names one that is there already. KVD_GUIDE_PORTS gives the first three digits of its hundred ports.
"""

import datetime
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import tempfile
import unittest

import helm_chart
from guide_steps import Shell, not_printed, steps_of, table
from helm_chart import BUILD, DAEMON, LOCKSCTL, ROOT
from test_chart_daemon import running

DOCS = ROOT / "deploy" / "docs"
GUIDE = DOCS / "operators-guide.md"
MISSING = [tool for tool in ("patchelf", "curl", "openssl") if not shutil.which(tool)]
WHY_SKIPPED = "" if DAEMON.exists() and LOCKSCTL.exists() else f"no {DAEMON} or {LOCKSCTL}"
WHY_SKIPPED = WHY_SKIPPED or (f"no {', '.join(MISSING)}" if MISSING else "")
WHY_NO_STORY = "" if os.environ.get("KVD_TARBALL") else WHY_SKIPPED
PAGES_OF_A_SELFTEST = 2 * (1 + 2 + 3 + 7 + 31 + 32 + 33 + 64 + 65 + 70)  # over two paths
UNITS_OF_A_PAGE = 4 * 2
SOURCE_FOLDERS = ("proto", "service", "client", "kernels")


def free_ports():
    """Three digits whose hundred ports nobody listens on."""
    given = os.environ.get("KVD_GUIDE_PORTS")
    for digits in [given] if given else random.sample(range(110, 320), 50):
        free = True
        for last in range(100):
            with socket.socket() as s:
                free = free and s.connect_ex(("127.0.0.1", int(f"{digits}{last:02}"))) != 0
        if free:
            return str(digits)
    raise AssertionError("no hundred free ports: set KVD_GUIDE_PORTS")


def exit_codes(output):
    return [int(code) for code in re.findall(r"exit code (\d+)", output)]


class Checks:
    """What each step must have come to: a method a step, which gets its output."""

    def __init__(self, test, ports):
        self.test, self.ports = test, ports

    def address(self, i):
        return f"127.0.0.1:{self.ports}{i}1"

    def install(self, output):
        version = re.search(r"^project\(locks_kvd VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE).group(1)
        self.test.assertTrue(output.startswith(f"locks-kvd {version},"), output)

    def size(self, output):
        # Deterministic: the page shows exactly this.
        shown = next(s.shown for s in steps_of(GUIDE.read_text()) if s.name == "size")
        self.test.assertEqual(shown, output.splitlines())
        units, records = (int(x) for x in re.search(r"this page.*: a page (\d+) \+ (\d+) bytes", output).groups())
        self.page = units, records
        self.slots = int(re.search(r"slots of 128 MiB of this page: (\d+)", output).group(1))

    def certificates(self, output):
        self.test.assertEqual(4, len(re.findall(r"^600 ", output, re.MULTILINE)), output)

    def configure(self, output):
        self.test.assertEqual(3 * "good: 1 arenas\n", output)

    def bad_configuration(self, output):
        self.test.assertEqual([2, 2], exit_codes(output))
        self.test.assertIn("head_dim", output)
        self.test.assertIn("copies", output)

    def contexts(self, output):
        self.test.assertEqual("", output)

    def start(self, output):
        memory = re.search(r"^memory .* slots=(\d+) slot_bytes=(\d+) record_bytes=(\d+)", output, re.MULTILINE)
        slots, units, records = (int(x) for x in memory.groups())
        self.test.assertEqual((self.slots - 1, self.page), (slots, (units, records)))

    def look(self, output):
        members = table(output, "member")
        self.test.assertEqual([(self.address(i), "serving", str(self.slots - 1)) for i in (1, 2, 3)],
                              [(m["member"], m["state"], m["pages_total"]) for m in members])
        self.incarnations = [m["incarnation"] for m in members]
        results = [(c["check"], c["result"]) for c in table(output, "check")]
        self.test.assertEqual(3, results.count(("fetch", "ok")), output)
        self.test.assertNotIn("failed", {result for _, result in results})
        self.test.assertEqual(["shared"] * 3, [p["path"] for p in table(output, "daemon")])

    def selftest(self, output):
        rows = table(output, "path")
        self.test.assertEqual({"shared", "ucx"}, {r["path"] for r in rows})
        self.test.assertEqual(PAGES_OF_A_SELFTEST, sum(int(r["pages"]) for r in rows))
        for row in rows:
            self.test.assertEqual((str(int(row["pages"]) * UNITS_OF_A_PAGE), "0", "ok"), (row["units"], row["wrong"], row["result"]))
        self.sealed = [int(r["sealed"]) for r in table(output, "daemon")]
        self.test.assertEqual(PAGES_OF_A_SELFTEST, sum(self.sealed))
        self.test.assertTrue(all(self.sealed), self.sealed)

    def watch(self, output):
        self.test.assertEqual("ok", output.splitlines()[0])
        self.test.assertIn(f'locks_kvd_slots{{arena="demo/small",state="sealed"}} {self.sealed[0]}\n', output)
        self.test.assertIn('locks_kvd_members{state="listed"} 3\n', output)
        self.test.assertIn(f"{self.sealed[0]} sealed", output)
        units = int(re.search(r'^locks_kvd_fetch_units_total\{.*status="OK"\} (\d+)$', output, re.MULTILINE).group(1))
        self.test.assertGreater(units, 0)
        self.test.assertEqual(6, len(re.findall(r"^127\.0\.0\.1:\d+ +serving", output, re.MULTILINE)))

    def drain(self, output):
        self.test.assertEqual(self.sealed, [int(x) for x in re.search(r"before: (\d+) (\d+) (\d+)", output).groups()])
        self.test.assertIn(f"drain_moved pages={self.sealed[2]} left=0 ", output)
        after = [int(x) for x in re.search(r"after: (\d+) (\d+)", output).groups()]
        self.test.assertEqual(PAGES_OF_A_SELFTEST, sum(after))
        self.test.assertTrue(all(a >= b for a, b in zip(after, self.sealed)), (after, self.sealed))
        verified = table(output[output.index("after:"):], "daemon")
        self.test.assertEqual([(str(pages), str(pages * UNITS_OF_A_PAGE), "0") for pages in after],
                              [(v["pages"], v["units"], v["wrong"]) for v in verified])
        self.test.assertEqual(["serving", "serving", "unreachable"], [m["state"] for m in table(output, "member")])
        self.test.assertEqual([3], exit_codes(output))

    def upgrade(self, output):
        self.test.assertIn(f"at the third: {self.sealed[2]} of {self.sealed[2]}\n", output)
        self.test.assertRegex(output, r"(?m)^/.*/next/locks-kvd-[^/]*/bin/locks-kvd$")
        members = table(output, "member")
        self.test.assertEqual(["serving"] * 3, [m["state"] for m in members])
        same = [m["incarnation"] == before for m, before in zip(members, self.incarnations)]
        self.test.assertEqual([True, False, False], same)

    def refusals(self, output):
        self.test.assertEqual([3, 1, 1], exit_codes(output))
        self.test.assertIn("role: expected admin, got client", output)
        self.test.assertIn("role: expected client, got admin", output)
        self.test.assertEqual(1 + 3, len(re.findall(r"^(750 socket|660 socket/locks-kvd-74\d\d\.sock)$", output, re.MULTILINE)))

    def rotate(self, output):
        before, after = (datetime.date.fromisoformat(x) for x in re.findall(r"^expires at (\S+) \S+ *$", output, re.MULTILINE))
        self.test.assertEqual(275, (after - before).days)
        self.test.assertEqual([3], exit_codes(output))

    def debug(self, output):
        verified = table(output[output.index("evicted_meanwhile") - 60:], "daemon")
        self.test.assertEqual(["0"] * 3, [v["wrong"] for v in verified])
        names = set(re.findall(r"^locks-kvd/\S+$", output, re.MULTILINE))
        for i in (1, 2, 3):
            for file in ("stats.json", "config.textproto", "slowlog.json", "metrics.txt"):
                self.test.assertIn(f"locks-kvd/127.0.0.1_{self.ports}{i}1/{file}", names)
        self.test.assertNotIn("problems.txt", output)

    def stop(self, output):
        self.test.assertIn("nothing is left", output)


@unittest.skipIf(WHY_NO_STORY, WHY_NO_STORY)
class OperatorsGuideTest(unittest.TestCase):
    def test_every_command_does_what_the_guide_says(self):
        steps = steps_of(GUIDE.read_text())
        with tempfile.TemporaryDirectory() as place:
            archive = os.environ.get("KVD_TARBALL")
            if archive is None:
                made = subprocess.run(["bash", ROOT / "deploy/tarball.sh", f"--build-dir={BUILD}", f"--out={place}/out"], capture_output=True, text=True)
                self.assertEqual(0, made.returncode, made.stderr)
                (archive,) = pathlib.Path(place, "out").glob("*.tar.gz")
            folder = pathlib.Path(place, "story")
            folder.mkdir()
            ports = free_ports()
            shell = Shell(folder, {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TARBALL": str(archive), "P": ports})
            self.addCleanup(shell.close)
            checks = Checks(self, ports)
            for step in steps:
                output = shell.run(step.code)
                self.assertEqual([], not_printed(step.shown, output), f"{step.name}: the guide shows what was not printed:\n{output}")
                getattr(checks, step.name.replace("-", "_"))(output)
            # What is not printed: a drained daemon's log.
            logs = "".join(log.read_text() for log in folder.glob("kv-*.log"))
            self.assertNotRegex(logs, r"(?m)^\S+Z error ")
            self.assertEqual(5, logs.count("drain_end clean=true"), logs)

    def test_every_step_is_checked(self):
        methods = {name for name in vars(Checks) if not name.startswith("_")} - {"address"}
        self.assertEqual({s.name.replace("-", "_") for s in steps_of(GUIDE.read_text())}, methods)


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class SizeTest(unittest.TestCase):
    """The formulas of section 2 are the daemon's, whatever the geometry."""

    def test_pages_and_slots_are_what_the_daemon_says(self):
        code = next(s.code for s in steps_of(GUIDE.read_text()) if s.name == "size")
        function = code[:code.index("row()")]
        for layers, heads, dim, tokens, rank in ((32, 8, 128, 16, 8), (1, 1, 64, 16, 4), (3, 4, 96, 32, 8), (2, 8, 256, 16, 4)):
            with self.subTest(geometry=(layers, heads, dim, tokens, rank)):
                done = subprocess.run(["bash", "-c", f"{function}\nbytes_of_a_page {layers} {heads} {dim} {tokens} {rank}"],
                                      capture_output=True, text=True, check=True)
                units, records = (int(x) for x in done.stdout.split())
                geometry = {"numLayers": layers, "numQHeads": heads, "numKvHeads": heads, "headDim": dim, "pageTokens": tokens,
                            "rank": rank, "softmaxScale": 0.1}
                arena = {"tenant": "t", "model": "m", "bytes": 64 << 20, "identity": {"weightsId": "w"}, "geometry": geometry}
                config = {"control": {"address": "127.0.0.1:0"}, "data": {"ucx": False}, "arenas": [arena]}
                with running(json.dumps(config), []) as log:
                    said = json.loads(next(line for line in log.read_text().splitlines() if '"memory"' in line))
                self.assertEqual((units, (records + 63) // 64 * 64), (int(said["slot_bytes"]), (int(said["record_bytes"]) + 63) // 64 * 64))
                slots = (64 << 20) // (units + records + 64)
                # In slabs of equal size; one slot is the canary's.
                self.assertAlmostEqual(slots - 1, int(said["slots"]), delta=1)


class LinkTest(unittest.TestCase):
    """The client guide's CMakeLists.txt, as an engine's. The library itself is not built again: configuring, and compiling one source
    that includes it, is what differs between a project of its own and this one's tests."""

    @unittest.skipUnless(shutil.which("cmake") and shutil.which("ninja"), "no cmake or ninja")
    def test_an_engine_is_configured_and_compiled_as_the_client_guide_says(self):
        guide = (DOCS / "client-guide.md").read_text()
        (lists,) = re.findall(r"^```cmake\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
        with tempfile.TemporaryDirectory() as place:
            engine = pathlib.Path(place)
            (engine / "CMakeLists.txt").write_text(lists)
            (engine / "locks-kvd").symlink_to(ROOT)
            (engine / "engine.cc").write_text('#include "client/kv_client.h"\n\n'
                                              "int main() { return kvd::KvClient::Make(kvd::ClientOptions()).ok() ? 0 : 1; }\n")
            for command in (["cmake", "-S", engine, "-B", engine / "build", "-G", "Ninja"],
                            ["ninja", "-C", engine / "build", "-j1", "CMakeFiles/engine.dir/engine.cc.o"]):
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                self.assertEqual(0, done.returncode, done.stdout[-3000:] + done.stderr[-3000:])
            targets = subprocess.run(["ninja", "-C", engine / "build", "-t", "targets", "all"], capture_output=True, text=True).stdout
            self.assertIn("engine:", targets)
            self.assertNotIn("_test:", targets)
            self.assertNotIn("_bench:", targets)


class StepsTest(unittest.TestCase):
    """The tools of this test can fail."""

    def test_a_failed_command_ends_the_story(self):
        shell = Shell("/", {"PATH": "/usr/bin:/bin"})
        self.addCleanup(shell.close)
        self.assertEqual("1\n", shell.run("x=1; echo $x"))
        self.assertEqual("1\n", shell.run("echo $x"))
        with self.assertRaisesRegex(AssertionError, "false | true"):
            shell.run("false | true\necho not here")

    def test_a_step_that_takes_too_long_is_ended(self):
        shell = Shell("/", {"PATH": "/usr/bin:/bin"})
        self.addCleanup(shell.close)
        with self.assertRaises(AssertionError):
            shell.run("sleep 60", limit_s=0.2)

    def test_a_piece_that_is_no_step_is_seen(self):
        page = "<!-- step: a -->\n```sh\ntrue\n```\n\n```text\nx\n```\n"
        self.assertEqual(["a"], [s.name for s in steps_of(page)])
        for wrong in (page + "```sh\nfalse\n```\n", page + "```text\ny\n```\n", page + page):
            with self.assertRaises(AssertionError):
                steps_of(wrong)

    def test_lines_are_compared_by_shape_and_order(self):
        self.assertEqual([], not_printed(["a 12", "b  0123456789ab"], "a 7\nc\nb fedcba987654 rest\n"))
        self.assertEqual(["b"], not_printed(["a", "b"], "b\na\n"))
        self.assertEqual(["ok 1"], not_printed(["ok 1"], "failed 1\n"))

    def test_empty_cells_of_a_table_stay_in_their_column(self):
        rows = table("a   bb  c\n1       x y\n22  3   z\n\nexit code 3\n", "a")
        self.assertEqual([{"a": "1", "bb": "", "c": "x y"}, {"a": "22", "bb": "3", "c": "z"}], rows[:2])


def source_text():
    files = [p for folder in SOURCE_FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".cc", ".h", ".proto")]
    # Adjacent literals are one message.
    return re.sub(r'"\s*\n\s*"', "", "\n".join(p.read_text() for p in files))


class TroubleshootingTest(unittest.TestCase):
    """Every message that the page quotes, in the column *you see*, stands in the source."""

    @classmethod
    def setUpClass(cls):
        cls.source = source_text()
        cls.metrics = (DOCS / "metrics.md").read_text()

    def quoted(self):
        """Quoted messages: an ellipsis stands for what is filled in."""
        page = (DOCS / "troubleshooting.md").read_text()
        cells = re.findall(r"^\| (`.*?`[^|]*) \|", page, re.MULTILINE)
        return [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]

    def exists(self, quote):
        """Its pieces stand in the source near each other, in order; or it is a metric's name."""
        pieces = [re.escape(piece.strip().replace('"', '\\"')) for piece in quote.split("…") if piece.strip()]
        return f"`{quote}`" in self.metrics or re.search("(?s:.{0,300}?)".join(pieces), self.source) is not None

    def test_they_exist(self):
        quoted = self.quoted()
        self.assertGreater(len(quoted), 60)
        self.assertEqual([], [quote for quote in quoted if not self.exists(quote)])

    def test_another_message_would_be_seen(self):
        for quote in ("drain_moves pages=…", ": cannot listen: the port is taken", "drain_end clean=… move_failed to=", "locks_kvd_slot"):
            self.assertFalse(self.exists(quote), quote)

    def test_links_of_the_pages_lead_somewhere(self):
        for page in [*DOCS.glob("*.md"), *DOCS.glob("runbooks/*.md")]:
            for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
                self.assertTrue((page.parent / link).exists(), f"{page.name}: {link}")


if __name__ == "__main__":
    helm_chart.main()
