"""Translates a pod's containers into commands for this machine.

Ports, volumes, variables and paths are resolved. A field of a manifest is either honoured or
refused with a message; no field that would change what runs is dropped silently.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.engines import UNDECIDED
from sluice.stores.filesystem import TIMEOUT_VARIABLE
from sluice_operator.plan.facts.model import KubeObject

LOOPBACK = "127.0.0.1"
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_BEFORE, _AFTER = r"(?<![\w.\-/])", r"(?=$|[/:;,\s\"'\])}@])"
# All processes of a run are on this machine. By default gloo and NCCL listen on its network.
COLLECTIVES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# On one machine, ranks open each other's memory without these features. Containers and virtual
# machines often show GPUs whose fabric manager they cannot reach, and there NCCL would fail.
# The host's environment overrides them.
NVLINK = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


class PodError(ValueError):
    """A pod cannot run on this machine. The text says why."""


@dataclass(frozen=True, slots=True)
class ContainerCommand:
    """A container that is ready to be started."""

    name: str
    argv: list[str]
    env: dict[str, str]
    cwd: str | None


@dataclass(frozen=True, slots=True)
class HostBindings:
    """The directories, ports and addresses of this machine that a pod gets."""

    volumes: Mapping[str, Path]  # directories by volume name
    ports: Mapping[str, int]  # ports of this machine by the names of container ports
    overrides: Mapping[str, str]  # variables with another value than in a cluster
    objects: Mapping[str, KubeObject]  # config maps and secrets by "Kind/name"
    # Addresses of other pods by their DNS name and port in a cluster.
    addresses: Mapping[str, str] = field(default_factory=dict)


def all_containers(pod: KubeObject) -> list[dict[str, Any]]:
    """Return the pod's init containers, which run one after the other, and then the others."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def commands(
    pod: KubeObject, bindings: HostBindings, inherited: Mapping[str, str]
) -> list[ContainerCommand]:
    """Return the commands of all containers, init containers first.

    Parameters
    ----------
    pod
        The pod's manifest.
    bindings
        What this machine gives the pod.
    inherited
        The environment on which the variables of each container are put.

    Raises
    ------
    PodError
        The pod cannot run on this machine.

    """
    check(pod)
    return [_command(pod, container, bindings, inherited) for container in all_containers(pod)]


def check(pod: KubeObject) -> None:
    if any(container.get("restartPolicy") for container in pod["spec"].get("initContainers", [])):
        raise PodError(
            "an initContainer with a restartPolicy needs a cluster; make it one of the pod's "
            "containers"
        )
    for container in all_containers(pod):
        if not container.get("command"):
            raise PodError(
                f"container {container['name']} has no command; a laptop does not know its image's"
            )


def _command(
    pod: KubeObject, container: dict[str, Any], bindings: HostBindings, inherited: Mapping[str, str]
) -> ContainerCommand:
    paths = mount_paths(container, bindings.volumes)
    variables = environment(pod, container, bindings, paths, inherited)
    words = [*container["command"], *container.get("args", [])]
    argv = [
        translate(bindings.addresses.get(word, expand(word, variables)), paths) for word in words
    ]
    if argv[0] in ("python", "python3"):
        argv[0] = sys.executable
    cwd = container.get("workingDir")
    return ContainerCommand(
        container["name"], argv, {**inherited, **variables}, translate(cwd, paths) if cwd else None
    )


def mount_paths(container: dict[str, Any], volumes: Mapping[str, Path]) -> dict[str, str]:
    """Return the directories of this machine by mount path."""
    directories = {}
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            raise PodError(
                f"container {container['name']} mounts {mount['name']}, which is no volume of the "
                "pod"
            )
        directory = volumes[mount["name"]] / mount.get("subPath", "")
        directories[mount["mountPath"].rstrip("/")] = str(directory)
    return directories


def translate(text: str, paths: Mapping[str, str]) -> str:
    """Replace mount paths at the start of paths by this machine's directories, longest first."""
    if not paths:
        return text
    names = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    return re.sub(f"{_BEFORE}({names}){_AFTER}", lambda match: paths[match.group(1)], text)


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand $(NAME) as Kubernetes does: `$$` is a dollar sign, unknown names stay unchanged."""

    def value(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else env.get(match.group(1), match.group())

    return _REFERENCE.sub(value, text)


def environment(
    pod: KubeObject,
    container: dict[str, Any],
    bindings: HostBindings,
    paths: Mapping[str, str],
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables of a container; each may refer to those before it.

    A Secret that the user created is not part of a run. A variable of this machine with the same
    name takes the place of its key.
    """
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for key, text in _env_from(source, bindings).items():
            variables[source.get("prefix", "") + key] = text
    overrides = dict(bindings.overrides) | {
        f"SLUICE_PORT_{name.upper()}": str(port) for name, port in bindings.ports.items()
    }
    for entry in container.get("env", []):
        name = entry["name"]
        if name in inherited and (_is_elsewhere(entry, bindings) or _is_undecided(entry)):
            continue
        value: str | None = overrides.get(name)
        if value is None:
            value = _value(pod, entry, variables, bindings)
        if value is not None:
            variables[name] = translate(value, paths)
    return variables


def _is_elsewhere(entry: dict[str, Any], bindings: HostBindings) -> bool:
    """Return True if the variable comes from a Secret that only a cluster has."""
    reference = (entry.get("valueFrom") or {}).get("secretKeyRef")
    return reference is not None and f"Secret/{reference['name']}" not in bindings.objects


def _is_undecided(entry: dict[str, Any]) -> bool:
    """Return True if this machine may choose the value of the variable."""
    return (entry["name"], entry.get("value")) in UNDECIDED.items()


def _value(
    pod: KubeObject, entry: dict[str, Any], env: Mapping[str, str], bindings: HostBindings
) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return expand(entry.get("value", ""), env)
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"])
    kind, reference = _reference(source)
    data = _data(bindings, kind, reference)
    if reference["key"] in data:
        return data[reference["key"]]
    if reference.get("optional"):
        return None
    raise PodError(
        f"{kind} {reference['name']} has no key {reference['key']} (for variable {entry['name']})"
    )


def _env_from(source: dict[str, Any], bindings: HostBindings) -> dict[str, str]:
    kind, field = (
        ("Secret", "secretRef") if "secretRef" in source else ("ConfigMap", "configMapRef")
    )
    if kind == "Secret" and f"{kind}/{source[field]['name']}" not in bindings.objects:
        return {}  # only a cluster has it: the variables of this machine take its place
    return _data(bindings, kind, source[field])


def _reference(source: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
        if key in source:
            return kind, source[key]
    raise PodError(f"valueFrom {', '.join(source)} needs a cluster")


def _data(bindings: HostBindings, kind: str, reference: dict[str, Any]) -> dict[str, str]:
    stored = bindings.objects.get(f"{kind}/{reference['name']}")
    if stored is None and not reference.get("optional"):
        raise PodError(
            f"{kind} {reference['name']} does not exist in this run; "
            "set the variable on this machine, or in the template"
        )
    return object_data(stored or {})


def object_data(stored: KubeObject) -> dict[str, str]:
    """Return the texts of a config map or a secret."""
    encoded = stored.get("data", {}) if stored.get("kind") == "Secret" else {}
    plain = {} if stored.get("kind") == "Secret" else stored.get("data", {})
    decoded = {key: base64.b64decode(value).decode() for key, value in encoded.items()}
    return {**plain, **decoded, **stored.get("stringData", {})}


def _field(pod: KubeObject, path: str) -> str:
    simple = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"].get("namespace", "default"),
        "metadata.uid": pod["metadata"].get("uid", ""),
        "status.podIP": LOOPBACK,
        "status.hostIP": LOOPBACK,
        "spec.nodeName": "localhost",
    }
    match = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if match:
        return str(pod["metadata"].get(match.group(1), {}).get(match.group(2), ""))
    if path not in simple:
        raise PodError(f"fieldRef {path} needs a cluster")
    return str(simple[path])


def inherited_env() -> dict[str, str]:
    """Return the environment that containers get from the host.

    It is the host's without SLUICE_ variables, because the host may itself be part of a job. The
    time limit of stores belongs to the machine.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLUICE_") or name == TIMEOUT_VARIABLE
    }
    # A log that lags behind cannot tell why its process died.
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    return NVLINK | env | COLLECTIVES | unbuffered
