"""The Pod Security Standards of Kubernetes as rules over one pod's spec: levels baseline and restricted.

violations(spec, level) lists what the level forbids, as sentences that begin with the name of the rule. Written from the published
standard; the admission controller of a cluster is not asked.
"""

LEVELS = ("restricted", "baseline", "privileged")  # strictest first

BASELINE_CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def containers(spec):
    return [c for key in ("initContainers", "containers", "ephemeralContainers") for c in spec.get(key, [])]


def contexts(spec):
    """(who, securityContext) of the pod and of each container."""
    yield "pod", spec.get("securityContext") or {}
    for container in containers(spec):
        yield container["name"], container.get("securityContext") or {}


def baseline(spec):
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"host namespaces: {field}"
    for volume in spec.get("volumes", []):
        if "hostPath" in volume:
            yield f"hostPath: volume {volume['name']}"
    for sysctl in (spec.get("securityContext") or {}).get("sysctls", []):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctls: {sysctl['name']}"
    for container in containers(spec):
        context = container.get("securityContext") or {}
        if context.get("privileged"):
            yield f"privileged: {container['name']}"
        for name in (context.get("capabilities") or {}).get("add", []):
            if name not in BASELINE_CAPABILITIES:
                yield f"capabilities: {container['name']} adds {name}"
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield f"host ports: {container['name']}"
        if context.get("procMount", "Default") != "Default":
            yield f"procMount: {container['name']}"
    for who, context in contexts(spec):
        selinux = context.get("seLinuxOptions") or {}
        if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
            yield f"SELinux: {who}"
        if (context.get("seccompProfile") or {}).get("type") == "Unconfined":
            yield f"seccomp: {who} is unconfined"
        if (context.get("appArmorProfile") or {}).get("type") == "Unconfined":
            yield f"AppArmor: {who} is unconfined"


def restricted(spec):
    yield from baseline(spec)
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= RESTRICTED_VOLUMES:
            yield f"volume types: {volume['name']} is {', '.join(sorted(kinds))}"
    pod = spec.get("securityContext") or {}
    for who, context in contexts(spec):
        if context.get("runAsUser") == 0:
            yield f"non-root: {who} is uid 0"
    for container in containers(spec):
        name, context = container["name"], container.get("securityContext") or {}
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"escalation: {name}"
        if context.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield f"non-root: {name} may be root"
        seccomp = context.get("seccompProfile") or pod.get("seccompProfile") or {}
        if seccomp.get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"seccomp: {name} has no profile"
        capabilities = context.get("capabilities") or {}
        if "ALL" not in capabilities.get("drop", []):
            yield f"capabilities: {name} does not drop ALL"
        for added in capabilities.get("add", []):
            if added != "NET_BIND_SERVICE":
                yield f"capabilities: {name} adds {added} over restricted"


def violations(spec, level):
    return {"restricted": list(restricted(spec)), "baseline": list(baseline(spec)), "privileged": []}[level]


def level_of(specs):
    """The strictest level that allows every pod of `specs`."""
    return next(level for level in LEVELS if not any(violations(spec, level) for spec in specs))
