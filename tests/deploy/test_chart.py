#!/usr/bin/env python3
"""The Helm chart without a cluster: rendering, schemas, values, Pod Security, and the objects' own contents.

usage: build/venv/bin/python -B tests/deploy/test_chart.py
Needs what `deploy/install_deps.sh deploy` installs. What the real daemon says of the chart is in test_chart_daemon.py.
"""

import copy
import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import helm_chart
import pod_security
from helm_chart import CHART, PROFILES, ROOT, at, find, pod_specs, render, run_helm, values_of

WHY_SKIPPED = helm_chart.missing_tools()
try:
    import kubernetes_validate
    import kubernetes_validate.utils
    # It reads the definitions, 2 MB, for every object.
    kubernetes_validate.utils.schema_contents = functools.lru_cache(None)(kubernetes_validate.utils.schema_contents)
except ImportError as error:
    WHY_SKIPPED = WHY_SKIPPED or f"{error}: run deploy/install_deps.sh deploy"

KUBERNETES = ("1.29.0", "1.36.0")
# Kinds of CRDs, which the validator does not know.
FOREIGN_KINDS = {
    ("monitoring.coreos.com/v1", "PodMonitor"), ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("cert-manager.io/v1", "Certificate")}
CERT_MANAGER = ("tls.certManager.enabled=true", "tls.certManager.issuer.name=ca")


def problems_of(o, kubernetes):
    """What the schemas of that Kubernetes say against an object."""
    try:
        kubernetes_validate.validate(o, kubernetes, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        if (o["apiVersion"], o["kind"]) not in FOREIGN_KINDS:
            return [f"unknown kind {o['apiVersion']} {o['kind']}"]
    except kubernetes_validate.ValidationError as error:
        return [f"{o['kind']} {o['metadata']['name']}: {'.'.join(map(str, error.path))}: {error.message}"]
    return []


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class ObjectsTest(unittest.TestCase):
    """The matrix: helm 3 and 4, two versions of Kubernetes, every profile, CRDs there or not."""

    def test_every_object_of_the_matrix_fits_the_schemas(self):
        for helm, kubernetes, profile, crds in itertools.product(helm_chart.HELMS, KUBERNETES, PROFILES, (False, True)):
            with self.subTest(helm=helm, kubernetes=kubernetes, profile=profile, crds=crds):
                sets = CERT_MANAGER if crds else ()
                objects = render(profile, sets, helm, kubernetes, crds)
                self.assertEqual([], [p for o in objects for p in problems_of(o, kubernetes)])
                self.assertEqual(crds, any(o["kind"] == "PodMonitor" for o in objects))
                names = [(o["kind"], o["metadata"]["name"]) for o in objects]
                self.assertEqual(len(names), len(set(names)))

    def test_both_helms_render_the_same(self):
        for profile in PROFILES:
            with self.subTest(profile=profile):
                def key(o):
                    return o["kind"], o["metadata"]["name"]
                three, four = (sorted(render(profile, helm=helm), key=key) for helm in helm_chart.HELMS)
                self.assertEqual(three, four)

    def test_the_validator_refuses_wrong_objects(self):
        good = find(render(), "StatefulSet")
        self.assertEqual([], problems_of(good, "1.36"))
        for path, key, value in (("spec", "replicas", "2"), ("spec", "replica", 2),
                                 ("spec.template.spec.containers[0]", "imagePolicy", "Always")):
            bad = copy.deepcopy(good)
            at(bad, path)[key] = value
            self.assertNotEqual([], problems_of(bad, "1.36"), f"{path}.{key}")
        self.assertNotEqual([], problems_of({**good, "kind": "StatefulSets"}, "1.36"))

    def test_lint_is_strict_and_silent(self):
        for helm, profile in itertools.product(helm_chart.HELMS, PROFILES):
            with self.subTest(helm=helm, profile=profile):
                done = run_helm(helm, "lint", "--strict", str(CHART), *values_of(profile))
                self.assertEqual(0, done.returncode, done.stdout + done.stderr)
                self.assertNotIn("WARNING", done.stdout)

    def test_an_older_kubernetes_is_refused(self):
        with self.assertRaisesRegex(RuntimeError, "kubeVersion"):
            render(kubernetes="1.28.0")

    def test_packaging_keeps_the_files(self):
        with tempfile.TemporaryDirectory() as folder:
            done = run_helm("helm4", "package", str(CHART), "-d", folder)
            self.assertEqual(0, done.returncode, done.stderr)
            archive = next(pathlib.Path(folder).glob("*.tgz"))
            self.assertEqual(render(), render(chart=archive))


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class ValuesTest(unittest.TestCase):
    def assert_refused(self, sets, words):
        for helm in helm_chart.HELMS:
            done = run_helm(helm, "template", "pool", str(CHART), *values_of("cpu"), *itertools.chain(*(("--set", s) for s in sets)))
            self.assertNotEqual(0, done.returncode, f"{helm} takes {sets}")
            self.assertIn(words, done.stderr)

    def test_the_schema_refuses_and_names_the_key(self):
        for value, key in (
                ("foo=1", "foo"), ("image.foo=1", "foo"), ("arenas[0].foo=1", "foo"), ("tls.certManager.issuer.foo=1", "foo"),
                ("arenas[0].geometry.numHeads=8", "numHeads"), ("times.drainMs=5", "drainMs"), ("limits.foo=1", "foo"),
                ("mode=deployment", "mode"), ("replicas=0", "replicas"), ("replicas=two", "replicas"),
                ("image.sha256=abc", "sha256"), ("ports.control=70000", "control"), ("insecureAllow=yes please", "insecureAllow"),
                ("mode=null", "mode"), ("resources.memory=1.5Gi", "memory"), ("arenas[0].size=big", "size"),
                ("arenas[0].geometry.headDim=100", "headDim"), ("arenas[0].tenant=a b", "tenant"),
                ("security.memoryLock=always", "memoryLock"), ("metrics.podMonitor.enabled=perhaps", "enabled"),
                ("resources.devices.gpu=1", "devices"), ("cluster.copies=3", "copies"), ("log.level=loud", "level"),
                ("socket.hostPath=relative", "hostPath"), ("env.A=1", "env"), ("networkPolicy.workerLabels=null", "workerLabels")):
            with self.subTest(value=value):
                self.assert_refused([value], key)

    def test_the_schema_leaves_no_object_open(self):
        def walk(schema, path):
            if isinstance(schema, list):
                for item in schema:
                    walk(item, path)
            if not isinstance(schema, dict):
                return
            if schema.get("type") == "object" and path != ".properties.global":  # that one is every parent chart's
                self.assertIn("additionalProperties", schema, path)
                self.assertIsNot(schema["additionalProperties"], True, path)
            for key, value in schema.items():
                walk(value, f"{path}.{key}")
        schema = json.loads((CHART / "values.schema.json").read_text())
        walk(schema, "")
        self.assertFalse(schema["additionalProperties"])

    def test_combinations_that_cannot_work_are_refused(self):
        for sets, words in (
                (["resources.memory=1Gi"], "resources.memory"),
                (["arenas[0].size=64Gi", "resources.memory=64Gi"], "resources.memory"),
                (["terminationGracePeriodSeconds=79"], "terminationGracePeriodSeconds"),
                (["drain.timeoutSeconds=300"], "terminationGracePeriodSeconds: expected at least 320"),
                (["tls.enabled=false"], "insecureAllow"),
                (["tls.certManager.enabled=true"], "tls.certManager.issuer.name"),
                (["ports.dataLast=18514"], "ports.dataLast"),
                (["data.ucx=false"], "data.ucx")):
            with self.subTest(sets=sets):
                self.assert_refused(sets, words)
        render(None, ("terminationGracePeriodSeconds=80",))
        render(None, ("resources.memory=7Gi",))
        render(None, ("tls.enabled=false", "insecureAllow=true"))

    def test_two_arenas_of_one_name_are_refused(self):
        arena = json.loads(find(render(), "ConfigMap", "-client")["data"]["client.json"])["arenas"][0]
        with self.assertRaisesRegex(RuntimeError, r"arenas\[1\]"):
            render(values=json.dumps({"arenas": [{**arena, "size": "1Gi"}] * 2}))

    def test_the_readme_has_the_table_of_values(self):
        done = subprocess.run([sys.executable, "-B", ROOT / "deploy/helm/values_table.py", "--check"], capture_output=True, text=True)
        self.assertEqual(0, done.returncode, done.stderr)

    def test_an_explicit_value_wins_over_what_the_cluster_knows(self):
        def kinds(value, crds):
            return {o["kind"] for o in render(sets=(f"metrics.podMonitor.enabled={value}",), crds=crds)}
        self.assertIn("PodMonitor", kinds("auto", True))
        self.assertNotIn("PodMonitor", kinds("auto", False))
        self.assertIn("PodMonitor", kinds("true", False))
        self.assertNotIn("PodMonitor", kinds("false", True))


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class PodSecurityTest(unittest.TestCase):
    STATED = {"cpu": "restricted", "gpu": "restricted", "rdma": "restricted", "sidecar": "restricted", "node": "privileged"}

    def test_each_profile_has_the_level_that_its_header_states(self):
        for profile, level in self.STATED.items():
            with self.subTest(profile=profile):
                header = (CHART / f"values-{profile}.yaml").read_text()
                self.assertEqual([level], re.findall(r"^# Pod Security level: (\w+)$", header, re.MULTILINE))
                self.assertEqual(level, pod_security.level_of(pod_specs(render(profile)).values()))

    def test_node_needs_its_label_for_the_host_path_alone(self):
        for spec in pod_specs(render("node")).values():
            broken = pod_security.violations(spec, "baseline")
            self.assertTrue(all(rule.startswith("hostPath: volume socket") for rule in broken), broken)
            without = {**spec, "volumes": [v for v in spec.get("volumes", []) if "hostPath" not in v]}
            self.assertEqual([], pod_security.violations(without, "restricted"))

    def test_memory_locking_by_the_pod_needs_privileged(self):
        for lock in ("capability", "root"):
            spec = find(render("rdma", (f"security.memoryLock={lock}",)), "StatefulSet")["spec"]["template"]["spec"]
            self.assertIn("capabilities: locks-kvd adds IPC_LOCK", pod_security.violations(spec, "baseline"))
            self.assertFalse(at(spec, "containers[0].securityContext").get("privileged", False))

    def test_notes_name_the_level(self):
        for profile, level in self.STATED.items():
            done = run_helm("helm4", "install", "pool", str(CHART), "-n", "kv", "--dry-run=client", *values_of(profile))
            self.assertEqual(0, done.returncode, done.stderr)
            self.assertIn(f"pod-security.kubernetes.io/enforce={level}\n", done.stdout)

    def test_the_rules_see_each_way_to_break_them(self):
        good = find(render(), "StatefulSet")["spec"]["template"]["spec"]
        self.assertEqual([], pod_security.violations(good, "restricted"))
        container = "containers[0].securityContext"
        for path, change, level, rule in (
                ("", {"hostNetwork": True}, "baseline", "host namespaces"), ("", {"hostPID": True}, "baseline", "host namespaces"),
                ("", {"hostIPC": True}, "baseline", "host namespaces"),
                ("", {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "baseline", "hostPath"),
                ("", {"volumes": [{"name": "v", "nfs": {}}]}, "restricted", "volume types"),
                (container, {"privileged": True}, "baseline", "privileged"),
                (container, {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}, "baseline", "capabilities"),
                (container, {"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}, "restricted", "capabilities"),
                (container, {"capabilities": {}}, "restricted", "capabilities"),
                (container, {"allowPrivilegeEscalation": True}, "restricted", "escalation"),
                (container, {"seccompProfile": {"type": "Unconfined"}}, "baseline", "seccomp"),
                (container, {"runAsNonRoot": False}, "restricted", "non-root"), (container, {"runAsUser": 0}, "restricted", "non-root"),
                ("securityContext", {"seccompProfile": None}, "restricted", "seccomp"),
                ("securityContext", {"sysctls": [{"name": "kernel.msgmax"}]}, "baseline", "sysctls"),
                ("containers[0]", {"ports": [{"hostPort": 1}]}, "baseline", "host ports")):
            with self.subTest(path=path, change=change):
                bad = copy.deepcopy(good)
                (at(bad, path) if path else bad).update(change)
                self.assertTrue(any(r.startswith(rule) for r in pod_security.violations(bad, level)), rule)


# profile, arguments of --set, kind, end of the name, path, expected
EXPECTED = (
    ("cpu", (), "StatefulSet", "", "spec.podManagementPolicy", "Parallel"),
    ("cpu", (), "StatefulSet", "", "spec.serviceName", "pool-locks-kvd-members"),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.enableServiceLinks", False),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.automountServiceAccountToken", False),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.terminationGracePeriodSeconds", 90),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.topologySpreadConstraints[0].topologyKey", "kubernetes.io/hostname"),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.topologySpreadConstraints[1].topologyKey", "topology.kubernetes.io/zone"),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.securityContext.runAsUser", 65532),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.containers[0].securityContext.readOnlyRootFilesystem", True),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.containers[0].ports[data].containerPort", 18515),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.containers[0].startupProbe",
     {"grpc": {"port": 7412, "service": "startup"}, "periodSeconds": 5, "failureThreshold": 60}),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.containers[0].livenessProbe.grpc.service", "live"),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.containers[0].readinessProbe.grpc.service", "ready"),
    ("cpu", (), "StatefulSet", "", "spec.template.spec.containers[0].image", "locks-kvd:0.1.0"),
    ("cpu", ("image.sha256=" + "ab" * 32,), "StatefulSet", "", "spec.template.spec.containers[0].image", "locks-kvd@sha256:" + "ab" * 32),
    ("cpu", (), "Service", "-members", "spec.publishNotReadyAddresses", True),
    ("cpu", (), "Service", "-members", "spec.clusterIP", "None"),
    ("cpu", (), "Service", "-members", "spec.ports[control].port", 7411),
    ("cpu", (), "Service", "-ready", "spec.clusterIP", "None"),
    ("cpu", (), "PodDisruptionBudget", "", "spec.maxUnavailable", 1),
    ("cpu", (), "ServiceAccount", "", "automountServiceAccountToken", False),
    ("cpu", (), "NetworkPolicy", "-deny", "spec.policyTypes", ["Ingress", "Egress"]),
    ("cpu", (), "NetworkPolicy", "", "spec.ingress[0].ports",
     [{"port": 7411, "protocol": "TCP"}, {"port": 18515, "endPort": 18522, "protocol": "TCP"}]),
    ("cpu", (), "NetworkPolicy", "", "spec.ingress[0].from[0].podSelector.matchLabels", {"locks-kvd/worker": "true"}),
    ("cpu", (), "NetworkPolicy", "", "spec.ingress[2].ports", [{"port": 7413, "protocol": "TCP"}]),
    ("cpu", CERT_MANAGER, "Certificate", "-daemon", "spec.uris", ["locks-kvd://daemon"]),
    ("cpu", CERT_MANAGER, "Certificate", "-daemon", "spec.usages", ["server auth", "client auth"]),
    ("cpu", CERT_MANAGER, "Certificate", "-daemon", "spec.privateKey.rotationPolicy", "Always"),
    ("cpu", CERT_MANAGER, "Certificate", "-daemon", "spec.secretName", "pool-locks-kvd-tls"),
    ("cpu", CERT_MANAGER, "Certificate", "-client-demo", "spec.uris", ["locks-kvd://client/demo"]),
    ("cpu", CERT_MANAGER, "Certificate", "-admin", "spec.uris", ["locks-kvd://admin"]),
    ("gpu", (), "StatefulSet", "", "spec.template.spec.containers[0].resources.limits.nvidia\\.com/gpu", "1"),
    ("rdma", (), "StatefulSet", "", "spec.template.spec.containers[0].resources.limits.rdma/hca", "1"),
    ("node", (), "DaemonSet", "", "spec.template.spec.volumes[socket].hostPath", {"path": "/var/lib/locks-kvd", "type": "Directory"}),
    ("node", (), "DaemonSet", "", "spec.template.spec.securityContext.supplementalGroups", [65532]),
    ("node", (), "Service", "-local", "spec.internalTrafficPolicy", "Local"),
    ("sidecar", (), "StatefulSet", "", "spec.template.spec.initContainers[locks-kvd].restartPolicy", "Always"),
    ("sidecar", (), "StatefulSet", "", "spec.template.spec.volumes[socket].emptyDir.medium", "Memory"),
    ("sidecar", (), "StatefulSet", "", "spec.template.spec.containers[worker].volumeMounts[socket].mountPath", "/run/locks-kvd"),
)
# profile, kinds and ends of names that must not be there
ABSENT = (
    ("cpu", "Deployment", ""), ("cpu", "Role", ""), ("cpu", "DaemonSet", ""), ("cpu", "Service", "-local"),
    ("node", "StatefulSet", ""), ("node", "PodDisruptionBudget", ""), ("sidecar", "Service", "-ready"),
    ("sidecar", "Pod", "-test-selftest"))


@unittest.skipIf(WHY_SKIPPED, WHY_SKIPPED)
class ContentsTest(unittest.TestCase):
    def test_objects_say_what_they_must(self):
        for profile, sets, kind, suffix, path, expected in EXPECTED:
            with self.subTest(profile=profile, kind=kind + suffix, path=path):
                found = find(render(profile, sets), kind, suffix)
                if "\\." in path:  # a key with a point in it
                    path, key = path.rsplit("limits.", 1)
                    self.assertEqual(expected, at(found, path + "limits")[key.replace("\\.", ".")])
                else:
                    self.assertEqual(expected, at(found, path))

    def test_objects_that_must_not_be_there_are_not(self):
        for profile, kind, suffix in ABSENT:
            names = [o["metadata"]["name"] for o in render(profile) if o["kind"] == kind]
            self.assertNotIn("pool-locks-kvd" + suffix, names, f"{profile} {kind}")

    def test_probes_ask_for_services_that_the_daemon_has(self):
        known = set(re.findall(r'SetServingStatus\("(\w+)"', (ROOT / "service/health.cc").read_text()))
        for profile in PROFILES:
            container = helm_chart.daemon_container(render(profile))
            asked = {container[f"{probe}Probe"]["grpc"]["service"] for probe in ("startup", "liveness", "readiness")}
            self.assertEqual({"startup", "live", "ready"}, asked)
            self.assertLessEqual(asked, known)

    def test_selectors_find_the_daemons_and_not_the_tests(self):
        for profile in PROFILES:
            objects = render(profile)
            daemons = [o["spec"]["template"]["metadata"]["labels"] for o in objects if o["kind"] in ("StatefulSet", "DaemonSet")]
            tests = [o["metadata"]["labels"] for o in objects if o["kind"] == "Pod"]
            selectors = [o["spec"]["selector"] for o in objects if o["kind"] == "Service"]
            selectors += [o["spec"]["podSelector"]["matchLabels"] for o in objects if o["kind"] == "NetworkPolicy"]
            for selector in selectors:
                self.assertTrue(all(selector.items() <= labels.items() for labels in daemons))
                self.assertFalse(any(selector.items() <= labels.items() for labels in tests))

    def test_a_changed_configuration_restarts_the_pods_and_nothing_else_does(self):
        def template(*sets):
            return find(render(sets=sets), "StatefulSet")["spec"]["template"]
        self.assertNotEqual(template()["metadata"], template("log.level=debug")["metadata"])
        self.assertEqual(template(), template("replicas=3"))
        self.assertNotIn("helm.sh/chart", template()["metadata"]["labels"])

    def test_a_member_listens_where_workers_and_members_look_for_it(self):
        objects = render(sets=("replicas=3",))
        container = helm_chart.daemon_container(objects)
        addresses = []
        for pod in ("pool-locks-kvd-0", "pool-locks-kvd-1", "pool-locks-kvd-2"):
            environment = helm_chart.environment_of(container, pod)
            flag = next(a for a in container["args"] if a.startswith("--control-address="))
            addresses.append(helm_chart.expanded(flag, environment).removeprefix("--control-address="))
            self.assertEqual(environment["LOCKSCTL_DAEMONS"], addresses[-1])
        client = json.loads(find(objects, "ConfigMap", "-client")["data"]["client.json"])
        self.assertEqual(client["daemons"], addresses)
        # An SRV record's target is the pod's name in the Service.
        self.assertEqual("pool-locks-kvd-2.pool-locks-kvd-members.kv.svc.cluster.local:7411", addresses[2])
        config = json.loads(find(objects, "ConfigMap")["data"]["config.json"])
        self.assertEqual("_control._tcp.pool-locks-kvd-members.kv.svc.cluster.local", config["cluster"]["membersDns"])
        self.assertEqual("control", find(objects, "Service", "-members")["spec"]["ports"][0]["name"])

    def test_the_workers_pod_fits_the_schema(self):
        for profile in PROFILES:
            snippet = find(render(profile), "ConfigMap", "-client")["data"]["worker-pod.yaml"]
            pod = {"apiVersion": "v1", "kind": "Pod", **helm_chart.yaml.safe_load(snippet)}
            pod["metadata"]["name"] = "engine"
            pod["spec"]["containers"][0]["image"] = "engine"
            if profile == "sidecar":  # the socket's volume is that of the sidecar
                volumes = at(find(render(profile), "StatefulSet"), "spec.template.spec.volumes")
                pod["spec"]["volumes"] += [volume for volume in volumes if volume["name"] == "socket"]
            self.assertEqual([], problems_of(pod, "1.36"))
            mounted = {m["name"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
            self.assertLessEqual(mounted, {v["name"] for v in pod["spec"]["volumes"]})

    def test_tenants_never_share_a_secret(self):
        secrets = set()
        for tenant in ("team-a", "team_a", "Team-a", "team.a"):
            found = [o for o in render(sets=CERT_MANAGER + (f"arenas[0].tenant={tenant}",)) if o["kind"] == "Certificate"]
            secrets |= {o["spec"]["secretName"] for o in found if "client" in o["spec"]["secretName"]}
            self.assertTrue(all(re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", o["metadata"]["name"]) for o in found))
        self.assertEqual(4, len(secrets))

    def test_rules_and_dashboard_come_from_their_files(self):
        objects = render(crds=True)
        rules = CHART / "files" / "rules.yaml"
        if rules.exists():
            self.assertEqual(helm_chart.yaml.safe_load(rules.read_text()), find(objects, "PrometheusRule")["spec"])
        dashboard = CHART / "files" / "dashboard.json"
        if dashboard.exists():
            shown = find(objects, "ConfigMap", "-dashboard")["data"]["locks-kvd.json"]
            self.assertEqual(json.loads(dashboard.read_text()), json.loads(shown))

    def test_an_engines_own_chart_can_take_the_sidecar(self):
        with tempfile.TemporaryDirectory() as folder:
            parent = pathlib.Path(folder)
            (parent / "templates").mkdir()
            (parent / "charts").mkdir()
            (parent / "charts" / "locks-kvd").symlink_to(CHART)
            (parent / "Chart.yaml").write_text("{apiVersion: v2, name: engine, version: 0.1.0}\n")
            values = helm_chart.yaml.safe_load((CHART / "values-sidecar.yaml").read_text())
            values["sidecar"] = {"workload": False}
            (parent / "values.yaml").write_text(helm_chart.yaml.safe_dump({"locks-kvd": values}))
            (parent / "templates" / "pod.yaml").write_text(
                '{{- $kvd := index .Subcharts "locks-kvd" }}\n'
                "apiVersion: v1\nkind: Pod\nmetadata: {name: engine}\nspec:\n  containers: [{name: engine, image: engine}]\n"
                '  initContainers:\n    - {{ include "locks-kvd.sidecar" $kvd | nindent 6 | trim }}\n'
                '  volumes:\n    {{- include "locks-kvd.volumes" $kvd | nindent 4 }}\n'
                '  securityContext:\n    {{- include "locks-kvd.podSecurity" $kvd | nindent 4 }}\n')
            for helm in helm_chart.HELMS:
                objects = render(None, helm=helm, chart=parent)
                self.assertFalse(any(o["kind"] == "StatefulSet" for o in objects))
                pod = next(o for o in objects if o["kind"] == "Pod")
                self.assertEqual([], problems_of(pod, "1.29"))
                self.assertEqual("Always", pod["spec"]["initContainers"][0]["restartPolicy"])
                names = {o["metadata"]["name"] for o in objects if o["kind"] == "ConfigMap"}
                self.assertIn(at(pod, "spec.volumes[config].configMap.name"), names)


if __name__ == "__main__":
    helm_chart.main()
