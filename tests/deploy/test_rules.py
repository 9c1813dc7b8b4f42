#!/usr/bin/env python3
"""Alert rules, runbooks and dashboard: right for promtool, about metrics that exist, with cases that fire and that do not.

usage: KVD_BUILD_DIR=build/cpu build/venv/bin/python -B tests/deploy/test_rules.py
Needs promtool (deploy/install_deps.sh deploy). The cases are tests/deploy/rules_cases.yaml.
"""

import functools
import json
import subprocess
import tempfile
import unittest

import yaml

import monitoring
from monitoring import CLIENT, DAEMON, DASHBOARD, ROOT, RULES, RUNBOOKS

WHY_SKIPPED = monitoring.missing("promtool")
CASES = ROOT / "tests" / "deploy" / "rules_cases.yaml"


def promtool(*arguments):
    return subprocess.run([monitoring.tool("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60)


@functools.cache
def families():
    return {**monitoring.families_of_table(monitoring.table_of(DAEMON)), **monitoring.families_of_table(monitoring.table_of(CLIENT))}


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class RulesTest(unittest.TestCase):
    def test_promtool_takes_the_rules(self):
        check = promtool("check", "rules", RULES)
        self.assertEqual(0, check.returncode, check.stdout + check.stderr)

    def test_cases(self):
        result = promtool("test", "rules", CASES)
        self.assertEqual(0, result.returncode, result.stdout + result.stderr)

    def test_every_alert_has_a_case_that_fires_and_one_that_does_not(self):
        fires, does_not = set(), set()
        for case in yaml.safe_load(CASES.read_text())["tests"]:
            for at in case["alert_rule_test"]:
                (fires if at.get("exp_alerts") else does_not).add(at["alertname"])
        names = {rule["alert"] for rule in monitoring.rules()}
        self.assertEqual((names, names), (fires, does_not))

    def test_a_wrong_rule_is_noticed(self):
        # Each rule in turn is replaced by one that never fires: its case must fail.
        text = RULES.read_text()
        rules = yaml.safe_load(text)
        for i, rule in enumerate(rules["groups"][0]["rules"]):
            broken = yaml.safe_load(text)
            broken["groups"][0]["rules"][i]["expr"] = "vector(0) > 1"
            with tempfile.TemporaryDirectory() as folder:
                with open(f"{folder}/rules.yaml", "w") as file:
                    yaml.safe_dump(broken, file)
                cases = yaml.safe_load(CASES.read_text())
                cases["rule_files"] = ["rules.yaml"]
                cases["tests"] = [c for c in cases["tests"] if c["alert_rule_test"][0]["alertname"] == rule["alert"]]
                with open(f"{folder}/cases.yaml", "w") as file:
                    yaml.safe_dump(cases, file)
                self.assertNotEqual(0, promtool("test", "rules", f"{folder}/cases.yaml").returncode, rule["alert"])

    def test_every_alert_says_how_bad_it_is_and_what_to_do(self):
        for rule in monitoring.rules():
            self.assertRegex(rule["alert"], "^LocksKvd[A-Z]")
            self.assertIn(rule["labels"]["severity"], ("critical", "warning"))
            self.assertTrue(rule["annotations"]["summary"].endswith("."), rule["alert"])
            self.assertEqual(f"deploy/docs/runbooks/{rule['alert']}.md", rule["annotations"]["runbook_url"])

    def test_every_alert_has_a_runbook_and_every_runbook_an_alert(self):
        self.assertEqual(sorted(rule["alert"] for rule in monitoring.rules()), sorted(p.stem for p in RUNBOOKS.glob("*.md")))
        for rule in monitoring.rules():
            page = (RUNBOOKS / f"{rule['alert']}.md").read_text()
            self.assertIn(f"Level: {rule['labels']['severity']}.", page, rule["alert"])
            for heading in ("## Meaning", "## Check", "## Do"):
                self.assertIn(heading, page, rule["alert"])

    def test_rules_cases_and_runbooks_name_metrics_that_exist(self):
        known = families()
        texts = {RULES: RULES.read_text(), CASES: CASES.read_text(), **{p: p.read_text() for p in RUNBOOKS.glob("*.md")}}
        for path, text in texts.items():
            for name in monitoring.names_in(text):
                self.assertIsNotNone(monitoring.family_of(name, known), f"{name} in {path.name}")

    def test_labels_and_values_of_queries_exist(self):
        # A wrong label or value would make an alert silent for ever.
        values = {}
        for program in (DAEMON, CLIENT):
            for line in monitoring.table_of(program).splitlines()[2:]:
                name, _, labels, _ = [cell.strip() for cell in line.strip("|").split("|")]
                values[name.strip("`")] = {
                    label.split(":")[0].strip(): [v.strip() for v in label.partition(":")[2].split(",") if v.strip()]
                    for label in labels.split(";") if label.strip()}
        exprs = [rule["expr"] for rule in monitoring.rules()] + [target["expr"] for _, _, target in monitoring.queries()]
        for expr in exprs:
            for name, selector in monitoring.re.findall(r"\b(locks_kv[a-z0-9_]+)\{([^}]*)\}", expr):
                family = monitoring.family_of(name, families())
                for label, value in monitoring.re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', selector):
                    if label == "le":
                        continue
                    self.assertIn(label, values[family], expr)
                    for one in value.split("|"):
                        if values[family][label]:
                            self.assertIn(one, values[family][label], expr)


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class DashboardTest(unittest.TestCase):
    def test_every_panel_asks_for_metrics_that_exist(self):
        known = families()
        for row, title, target in monitoring.queries():
            for name in monitoring.names_in(target["expr"]):
                self.assertIsNotNone(monitoring.family_of(name, known), f"{name} in {row} / {title}")

    def test_every_metric_is_on_it(self):
        shown = set()
        for _, _, target in monitoring.queries():
            shown |= {monitoring.family_of(name, families()) for name in monitoring.names_in(target["expr"])}
        self.assertEqual([], sorted(set(families()) - shown))

    def test_ids_differ_and_panels_do_not_overlap(self):
        panels = json.loads(DASHBOARD.read_text())["panels"]
        self.assertEqual(len(panels), len({p["id"] for p in panels}))
        taken = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            self.assertFalse(cells & taken, panel["title"])
            self.assertLessEqual(at["x"] + at["w"], 24)
            taken |= cells


if __name__ == "__main__":
    unittest.main()
