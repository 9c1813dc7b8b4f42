"""What the tests of metrics, rules and dashboard share: where things are, their metric names, and a small
monitored pool: two real daemons, a client on each path, a real Prometheus that scrapes them all."""

import functools
import http.server
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KVD_BUILD_DIR", ROOT / "build" / "cpu")).resolve()
DAEMON = BUILD / "service" / "locks-kvd"
CLIENT = BUILD / "tests" / "system" / "metrics_client"
CHART_FILES = ROOT / "deploy" / "helm" / "locks-kvd" / "files"
RULES = CHART_FILES / "rules.yaml"
DASHBOARD = CHART_FILES / "dashboard.json"
PAGE = ROOT / "deploy" / "docs" / "metrics.md"
RUNBOOKS = ROOT / "deploy" / "docs" / "runbooks"

HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
DRAIN_MS = 20000


def tool(name):
    beside_build = ROOT / "build" / "tools" / name
    return str(beside_build) if beside_build.exists() else shutil.which(name)


def missing(*names):
    """Why a test cannot run on this machine; empty if it can."""
    wanted = [n for n in names if not tool(n)]
    if wanted:
        return f"no {' and no '.join(wanted)}: deploy/install_deps.sh deploy"
    return "" if DAEMON.exists() and CLIENT.exists() else f"no {DAEMON} or {CLIENT}"


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels():
    """Panels of the dashboard that have queries, each with its row's title."""
    row = ""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            yield row, panel


def queries():
    for row, panel in panels():
        for target in panel["targets"]:
            yield row, panel["title"], target


def without_variables(expr, rate_interval="1m"):
    """A query of the dashboard as Prometheus takes it."""
    return expr.replace("$__rate_interval", rate_interval)


def names_in(expr):
    return set(re.findall(r"\blocks_kv(?:d|_client)_[a-z0-9_]+", expr))


def family_of(name, families):
    """The family that a series' name belongs to, or None."""
    if name in families:
        return name
    for part in HISTOGRAM_PARTS:
        base = name.removesuffix(part)
        if base != name and families.get(base, {}).get("type") == "histogram":
            return base
    return None


def families_of_table(markdown):
    """{name: {type, labels}} of the lines `| `name` | type | labels | what |`."""
    families = {}
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `locks_kv") and len(cells) == 4:
            labels = {label.split(":")[0].strip() for label in cells[2].split(";") if label.strip()}
            families[cells[0].strip("`")] = {"type": cells[1], "labels": labels}
    return families


def families_of_text(text):
    """{name: {type, labels, series}} of an answer to a scrape; `le` is the histogram's own."""
    families = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            families[name] = {"type": kind, "labels": set(), "series": 0}
        elif line and not line.startswith("#"):
            name = re.match(r"[a-z0-9_]+", line).group()
            family = families[family_of(name, families)]
            family["series"] += 1
            family["labels"] |= set(re.findall(r'[{,]([a-z_]+)="', line)) - {"le"}
    return families


def table_of(program):
    return subprocess.run([program, "--list-metrics"], check=True, capture_output=True, text=True, timeout=30).stdout


def get(url, timeout=10):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


def wait_for(what, condition, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {seconds} s")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    extensions_map = {"": "text/plain; version=0.0.4"}

    def log_message(self, *_):
        pass


class MonitoredPool:
    """Starts everything in a directory of its own; close() ends what was started."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvd_monitoring_"))
        self.processes = []
        try:
            self.daemons = [self._start_daemon(i) for i in range(2)]
            addresses = [d["control_address"] for d in self.daemons]
            self._serve_client_files()
            for path in ("shared", "ucx"):
                self._start(f"client-{path}", [CLIENT, self.folder / "www" / path, path, *addresses], stdin=subprocess.PIPE)
            wait_for("the clients' files", lambda: all((self.folder / "www" / p).exists() for p in ("shared", "ucx")), 20)
            self._start_prometheus()
        except BaseException:
            self.close()
            raise

    def close(self):
        for _, process in reversed(self.processes):
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
        if hasattr(self, "http"):
            self.http.shutdown()
            self.http.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def check_alive(self):
        for name, process in self.processes:
            if process.poll() is not None:
                raise AssertionError(f"{name} ended with {process.returncode}: {self._log(name)}")

    def _log(self, name):
        return (self.folder / f"{name}.log").read_text()[-2000:]

    def _start(self, name, arguments, **options):
        log = open(self.folder / f"{name}.log", "w")
        process = subprocess.Popen([str(a) for a in arguments], stdout=log, stderr=log, **options)
        log.close()
        self.processes.append((name, process))

    def _start_daemon(self, number):
        folder = self.folder / f"daemon-{number}"
        (folder / "sockets").mkdir(parents=True, mode=0o750)
        config = {
            "control": {"address": "127.0.0.1:0"}, "metrics_address": "127.0.0.1:0", "ready_file": str(folder / "ready"),
            "data": {"socket_dir": str(folder / "sockets"), "ucx": True},
            "arenas": [{
                "tenant": "test", "model": "model", "bytes": 4 << 20, "identity": {"weights_id": "weights", "rope": "theta=10000"},
                "geometry": {"num_layers": 2, "num_q_heads": 6, "num_kv_heads": 2, "num_shards": 1, "head_dim": 64, "page_tokens": 16,
                             "rank": 8, "dtype": "DTYPE_BF16", "softmax_scale": 0.125}}],
            "times": {"heartbeat_ms": 200, "session_ttl_ms": 2000, "drain_ms": DRAIN_MS}, "log": {"format": "json"}}
        (folder / "config.json").write_text(json.dumps(config))
        self._start(f"daemon-{number}", [DAEMON, f"--config={folder / 'config.json'}"])

        def ready():
            self.check_alive()
            return (folder / "ready").exists() and (folder / "ready").read_text()
        text = wait_for(f"daemon-{number}", ready, 20)
        return dict(re.findall(r'(\w+): "([^"]*)"', text))

    def _serve_client_files(self):
        (self.folder / "www").mkdir()
        handler = functools.partial(QuietHandler, directory=str(self.folder / "www"))
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.client_url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def _start_prometheus(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        jobs = [{"job_name": "locks-kvd", "static_configs": [{"targets": [d["metrics_address"] for d in self.daemons]}]}]
        for path in ("shared", "ucx"):
            jobs.append({"job_name": f"engine-{path}", "metrics_path": f"/{path}",
                         "static_configs": [{"targets": [self.client_url.removeprefix("http://")]}]})
        config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(RULES)], "scrape_configs": jobs}
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._start("prometheus", [
            tool("prometheus"), f"--config.file={self.folder / 'prometheus.yml'}", f"--storage.tsdb.path={self.folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"])
        self.prometheus = f"http://127.0.0.1:{port}"

        def ready():
            self.check_alive()
            try:
                return get(f"{self.prometheus}/-/ready")
            except OSError:  # it does not listen yet, or answers 503 while it opens its storage
                return False
        wait_for("prometheus", ready, 30)

    def api(self, path, **parameters):
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            return json.loads(get(url))["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expr):
        return self.api("query", query=expr)["result"]

    def scraped(self, seconds):
        """Waits until every target was scraped for `seconds`. The first scrape comes 5 to 6 s after the start."""
        def enough():
            self.check_alive()
            ups = self.query(f"count_over_time(up[{2 * seconds}s])")
            return len(ups) == 4 and all(float(u["value"][1]) >= seconds for u in ups)
        wait_for("scrapes of all four targets", enough, seconds + 20)

    def up(self):
        return {(u["metric"]["job"], u["metric"]["instance"]): u["value"][1] for u in self.query("up")}
