#!/usr/bin/env python3
"""Page, code and live endpoints name the same metrics; a real Prometheus scrapes a small pool and answers the dashboard.

usage: KVD_BUILD_DIR=build/cpu build/venv/bin/python -B tests/deploy/test_metrics.py [--write]
--write: takes the tables of deploy/docs/metrics.md from the programs. Needs promtool and prometheus (deploy/install_deps.sh deploy).
"""

import re
import subprocess
import sys
import unittest

import monitoring
from monitoring import CLIENT, DAEMON, PAGE

WHY_SKIPPED = monitoring.missing("promtool", "prometheus")
TABLES = {"locks-kvd": DAEMON, "metrics_client": CLIENT}
SCRAPED_S = 15

# Families of the table that this pool cannot show, and why.
NOT_HERE = {
    "locks_kvd_cert_expiry_timestamp_seconds": "no TLS"}
# Panels whose queries find nothing here, and why.
EMPTY_PANELS = {
    "Days until certificates expire": "no TLS",
    "Better paths not used, by reason": "shows increases only: the clients attach before the first scrape",
}


def section(page, program):
    return re.search(rf"(<!-- begin: {program} --list-metrics -->\n)(.*?)(<!-- end -->)", page, re.S)


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class PageTest(unittest.TestCase):
    def test_the_page_has_the_tables_of_the_programs(self):
        page = PAGE.read_text()
        for name, program in TABLES.items():
            self.assertEqual(monitoring.table_of(program), section(page, name)[2], "run this test with --write")

    def test_the_chart_names_the_daemons_metrics(self):
        names = (monitoring.CHART_FILES / "metrics.txt").read_text().split()
        table = monitoring.families_of_table(monitoring.table_of(DAEMON))
        self.assertEqual([], sorted(set(names) - set(table)))

    def test_names_and_types_follow_the_rules(self):
        for program in TABLES.values():
            for name, family in monitoring.families_of_table(monitoring.table_of(program)).items():
                self.assertRegex(name, r"^locks_kv(d|_client)_[a-z_]+$")
                self.assertEqual(family["type"] == "counter", name.endswith("_total"), name)
                if family["type"] == "histogram":
                    self.assertRegex(name, "_(seconds|ratio)$")
                for label in family["labels"]:
                    self.assertNotIn(label, ("page", "key", "session", "token"))


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class LiveTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.pool = monitoring.MonitoredPool()
        cls.addClassCleanup(cls.pool.close)
        cls.pool.scraped(SCRAPED_S)

    def texts(self):
        for daemon in self.pool.daemons:
            yield DAEMON, monitoring.get(f"http://{daemon['metrics_address']}/metrics")
        for path in ("shared", "ucx"):
            yield CLIENT, monitoring.get(f"{self.pool.client_url}/{path}")

    def test_live_answers_show_the_table_and_nothing_else(self):
        for program, text in self.texts():
            table = monitoring.families_of_table(monitoring.table_of(program))
            live = monitoring.families_of_text(text)
            self.assertEqual(sorted(set(table) - set(NOT_HERE)), sorted(live))
            for name, family in live.items():
                self.assertEqual(table[name]["type"], family["type"], name)
                self.assertEqual(table[name]["labels"], family["labels"], name)
                self.assertGreater(family["series"], 0, name)

    def test_promtool_finds_no_fault(self):
        for _, text in self.texts():
            check = subprocess.run([monitoring.tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
            self.assertEqual((0, "", ""), (check.returncode, check.stdout, check.stderr))

    def test_every_target_is_up(self):
        self.assertEqual(["1"] * 4, list(self.pool.up().values()))

    def test_the_load_is_seen(self):
        # Both paths, at both ends: a counter that nobody feeds would be zero. Pages leave a small arena.
        rates = {
            "fetched, shared": 'locks_kv_client_fetched_units_total{path="shared",result="ok"}',
            "fetched, ucx": 'locks_kv_client_fetched_units_total{path="ucx",result="ok"}',
            "verified": "locks_kv_client_verified_units_total", "rows": "locks_kv_client_rows_total",
            "sent": "locks_kvd_fetch_bytes_total", "stored": 'locks_kvd_ingest_bytes_total{result="new"}',
            "sealed": 'locks_kvd_sealed_pages_total{result="new"}', "evicted": "locks_kvd_evicted_pages_total",
            "matched": 'locks_kvd_match_pages_total{result="hit"}', "leases": "locks_kvd_leased_age_seconds_count",
            "calls": 'locks_kvd_rpc_requests_total{code="OK"}'}
        for what, series in rates.items():
            result = self.pool.query(f"sum(rate({series}[30s]))")
            self.assertGreater(float(result[0]["value"][1]), 0, what)
        # What the daemons sent over ucx is at least what the client on that path got: the rest are records.
        sent = float(self.pool.query("sum(locks_kvd_fetch_bytes_total)")[0]["value"][1])
        got = float(self.pool.query('sum(locks_kv_client_fetched_bytes_total{path="ucx"})')[0]["value"][1])
        self.assertGreater(sent, 0.8 * got)

    def test_nothing_bad_is_counted(self):
        bad = ["locks_kv_client_verify_failures_total", "locks_kvd_checksum_failures_total", "locks_kvd_malformed_messages_total",
               "locks_kvd_auth_failures_total", "locks_kv_client_loss_actions_total", "locks_kv_client_daemon_incarnation_changes_total"]
        for series in bad:
            for result in self.pool.query(series):
                self.assertEqual("0", result["value"][1], result["metric"])

    def test_every_alert_is_loaded_and_none_fires(self):
        groups = self.pool.api("rules")["groups"]
        loaded = [rule for group in groups for rule in group["rules"]]
        self.assertEqual(sorted(r["alert"] for r in monitoring.rules()), sorted(r["name"] for r in loaded))
        for rule in loaded:
            self.assertEqual("ok", rule["health"], rule)
            if rule["name"] == "LocksKvdLoopStall":
                continue  # true on a machine that is busy with other work, as that of a test may be
            self.assertNotEqual("firing", rule["state"], rule)

    def test_every_query_of_the_dashboard_finds_something(self):
        empty = set()
        for _, title, target in monitoring.queries():
            if not self.pool.query(monitoring.without_variables(target["expr"])):
                empty.add(title)
        self.assertEqual(set(EMPTY_PANELS), empty)

    def test_summary_and_healthz(self):
        for daemon in self.pool.daemons:
            address = daemon["metrics_address"]
            self.assertIn("arena test/model", monitoring.get(f"http://{address}/metrics/summary"))
            self.assertEqual("ok\n", monitoring.get(f"http://{address}/healthz"))


def write():
    page = PAGE.read_text()
    for name, program in TABLES.items():
        found = section(page, name)
        page = page.replace(found[0], found[1] + monitoring.table_of(program) + found[3])
    PAGE.write_text(page)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        unittest.main()
