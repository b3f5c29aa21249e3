"""The Pod Security Standards, written out
(kubernetes.io/docs/concepts/security/pod-security-standards, version 1.36).

What admission of a namespace with the label `pod-security.kubernetes.io/enforce` refuses. Of pods
for Windows, and of pods in user namespaces (which relax some of it), there are none here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

Object = dict[str, Any]
Level = Literal["baseline", "restricted"]

CAPABILITIES = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
}
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SELINUX_TYPES = {
    None,
    "",
    "container_t",
    "container_init_t",
    "container_kvm_t",
    "container_engine_t",
}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
PROFILES = ("RuntimeDefault", "Localhost")


def violations(pod: Object, level: Level) -> list[str]:
    """Parts of the pod that the level forbids, one line each; empty if it is admitted."""
    checks = BASELINE + (RESTRICTED if level == "restricted" else ())
    return [problem for check in checks for problem in check(pod)]


def _containers(pod: Object) -> Iterator[tuple[str, Object]]:
    """(name, container) of all kinds of containers."""
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in pod["spec"].get(kind) or []:
            yield f"{container['name']}", container


def _contexts(pod: Object) -> Iterator[tuple[str, Object]]:
    """(whose, securityContext) of the pod and of its containers."""
    yield "pod", pod["spec"].get("securityContext") or {}
    for name, container in _containers(pod):
        yield name, container.get("securityContext") or {}


# -- baseline
# --------------------------------------------------------------------------------------------------


def _host_namespaces(pod: Object) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod["spec"].get(field):
            yield f"pod: {field}"


def _host_process(pod: Object) -> Iterator[str]:
    for who, context in _contexts(pod):
        if (context.get("windowsOptions") or {}).get("hostProcess"):
            yield f"{who}: windowsOptions.hostProcess"


def _privileged(pod: Object) -> Iterator[str]:
    for name, container in _containers(pod):
        if (container.get("securityContext") or {}).get("privileged"):
            yield f"{name}: privileged"


def _added_capabilities(pod: Object) -> Iterator[str]:
    for name, added in _added(pod):
        if added not in CAPABILITIES:
            yield f"{name}: capability {added}"


def _host_paths(pod: Object) -> Iterator[str]:
    for volume in pod["spec"].get("volumes") or []:
        if "hostPath" in volume:
            yield f"volume {volume['name']}: hostPath"


def _host_ports(pod: Object) -> Iterator[str]:
    for name, container in _containers(pod):
        if any(port.get("hostPort") for port in container.get("ports") or []):
            yield f"{name}: hostPort"


def _probe_hosts(pod: Object) -> Iterator[str]:
    """From 1.34 on: no probe or hook may be sent to another host."""
    for name, container in _containers(pod):
        handlers = [
            container.get(probe) or {}
            for probe in ("livenessProbe", "readinessProbe", "startupProbe")
        ]
        handlers += [
            (container.get("lifecycle") or {}).get(hook) or {} for hook in ("postStart", "preStop")
        ]
        for handler in handlers:
            if any((handler.get(kind) or {}).get("host") for kind in ("httpGet", "tcpSocket")):
                yield f"{name}: host of a probe or hook"


def _app_armor(pod: Object) -> Iterator[str]:
    for who, context in _contexts(pod):
        if (context.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in PROFILES:
            yield f"{who}: appArmorProfile"
    for key, value in (pod["metadata"].get("annotations") or {}).items():
        if key.startswith(APPARMOR) and not (
            value in ("", "runtime/default") or value.startswith("localhost/")
        ):
            yield f"{key.removeprefix(APPARMOR)}: AppArmor {value}"


def _selinux(pod: Object) -> Iterator[str]:
    for who, context in _contexts(pod):
        options = context.get("seLinuxOptions") or {}
        if options.get("type") not in SELINUX_TYPES or options.get("user") or options.get("role"):
            yield f"{who}: seLinuxOptions"


def _proc_mount(pod: Object) -> Iterator[str]:
    for who, context in _contexts(pod):
        if context.get("procMount", "Default") != "Default":
            yield f"{who}: procMount"


def _unconfined(pod: Object) -> Iterator[str]:
    for who, context in _contexts(pod):
        if (context.get("seccompProfile") or {}).get("type", "RuntimeDefault") not in PROFILES:
            yield f"{who}: seccompProfile"


def _sysctls(pod: Object) -> Iterator[str]:
    for sysctl in (pod["spec"].get("securityContext") or {}).get("sysctls") or []:
        if sysctl["name"] not in SYSCTLS:
            yield f"pod: sysctl {sysctl['name']}"


# -- restricted
# --------------------------------------------------------------------------------------------------


def _volume_types(pod: Object) -> Iterator[str]:
    for volume in pod["spec"].get("volumes") or []:
        if others := volume.keys() - VOLUMES - {"name"}:
            yield f"volume {volume['name']}: {', '.join(sorted(others))}"


def _escalation(pod: Object) -> Iterator[str]:
    for name, container in _containers(pod):
        if (container.get("securityContext") or {}).get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation must be false"


def _non_root(pod: Object) -> Iterator[str]:
    """Said for the pod, and nowhere taken back; or for each container."""
    of_pod = (pod["spec"].get("securityContext") or {}).get("runAsNonRoot")
    for name, container in _containers(pod):
        own = (container.get("securityContext") or {}).get("runAsNonRoot")
        if (of_pod if own is None else own) is not True:
            yield f"{name}: runAsNonRoot must be true"


def _root_user(pod: Object) -> Iterator[str]:
    for who, context in _contexts(pod):
        if context.get("runAsUser") == 0:
            yield f"{who}: runAsUser 0"


def _seccomp(pod: Object) -> Iterator[str]:
    of_pod = ((pod["spec"].get("securityContext") or {}).get("seccompProfile") or {}).get("type")
    for name, container in _containers(pod):
        own = ((container.get("securityContext") or {}).get("seccompProfile") or {}).get("type")
        if (own or of_pod) not in PROFILES:
            yield f"{name}: seccompProfile must be RuntimeDefault or Localhost"


def _dropped_capabilities(pod: Object) -> Iterator[str]:
    for name, container in _containers(pod):
        if "ALL" not in (
            ((container.get("securityContext") or {}).get("capabilities") or {}).get("drop") or []
        ):
            yield f"{name}: capabilities must drop ALL"
    for name, added in _added(pod):
        if added != "NET_BIND_SERVICE":
            yield f"{name}: capability {added}"


def _added(pod: Object) -> Iterator[tuple[str, str]]:
    for name, container in _containers(pod):
        for capability in ((container.get("securityContext") or {}).get("capabilities") or {}).get(
            "add"
        ) or []:
            yield name, capability


Check = Callable[[Object], Iterator[str]]
BASELINE: tuple[Check, ...] = (
    _host_namespaces,
    _host_process,
    _privileged,
    _added_capabilities,
    _host_paths,
    _host_ports,
    _probe_hosts,
    _app_armor,
    _selinux,
    _proc_mount,
    _unconfined,
    _sysctls,
)
RESTRICTED: tuple[Check, ...] = (
    _volume_types,
    _escalation,
    _non_root,
    _root_user,
    _seccomp,
    _dropped_capabilities,
)
