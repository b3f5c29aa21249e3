"""A pod's containers as commands for this machine: ports, volumes, variables and paths resolved.

Everything that a manifest may say is either honoured or refused with a message; nothing is dropped
silently that would change what runs.
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
from sluice_operator.plan.facts.model import KubeObject

LOOPBACK = "127.0.0.1"
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_BEFORE, _AFTER = r"(?<![\w.\-/])", r"(?=$|[/:;,\s\"'\])}@])"


class PodError(ValueError):
    """A pod that cannot run on this machine. The text says what and why."""


@dataclass(frozen=True, slots=True)
class ContainerCommand:
    """One container, ready to be started."""

    name: str
    argv: list[str]
    env: dict[str, str]
    cwd: str | None


@dataclass(frozen=True, slots=True)
class HostBindings:
    """Where a pod runs: what this machine gives it.

    volumes: volume name -> directory; ports: container port's name -> port; overrides:
    variables that have another value on a laptop than in a cluster; objects: config maps and
    secrets by "Kind/name"; addresses: those of other pods by the name that a cluster's DNS has
    for them -> here.
    """

    volumes: Mapping[str, Path]
    ports: Mapping[str, int]
    overrides: Mapping[str, str]
    objects: Mapping[str, KubeObject]
    addresses: Mapping[str, str] = field(default_factory=dict)


def all_containers(pod: KubeObject) -> list[dict[str, Any]]:
    """Those of `initContainers`, which run first and one after the other, then the pod's own."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def commands(
    pod: KubeObject, place: HostBindings, inherited: Mapping[str, str]
) -> list[ContainerCommand]:
    """Of all containers. inherited: the environment that every container starts from."""
    check(pod)
    return [_command(pod, container, place, inherited) for container in all_containers(pod)]


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
    pod: KubeObject, container: dict[str, Any], place: HostBindings, inherited: Mapping[str, str]
) -> ContainerCommand:
    paths = mount_paths(container, place.volumes)
    variables = environment(pod, container, place, paths, inherited)
    words = [*container["command"], *container.get("args", [])]
    argv = [translate(place.addresses.get(word, expand(word, variables)), paths) for word in words]
    if argv[0] in ("python", "python3"):
        argv[0] = sys.executable
    cwd = container.get("workingDir")
    return ContainerCommand(
        container["name"], argv, {**inherited, **variables}, translate(cwd, paths) if cwd else None
    )


def mount_paths(container: dict[str, Any], volumes: Mapping[str, Path]) -> dict[str, str]:
    """MountPath -> directory on this machine."""
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
    """Replace mount paths, where they stand as whole path prefixes, by this machine's directories;
    longest first.
    """
    if not paths:
        return text
    names = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    return re.sub(f"{_BEFORE}({names}){_AFTER}", lambda match: paths[match.group(1)], text)


def expand(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) as Kubernetes expands it: `$$` is a dollar sign, and what is not set
    stays as it is.
    """

    def value(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else env.get(match.group(1), match.group())

    return _REFERENCE.sub(value, text)


def environment(
    pod: KubeObject,
    container: dict[str, Any],
    place: HostBindings,
    paths: Mapping[str, str],
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """The container's own variables, in order, each able to use those before it.

    A Secret of the user's is no part of a run; a variable of this machine with the same name stands
    for its key.
    """
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for key, text in _env_from(source, place).items():
            variables[source.get("prefix", "") + key] = text
    overrides = dict(place.overrides) | {
        f"SLUICE_PORT_{name.upper()}": str(port) for name, port in place.ports.items()
    }
    for entry in container.get("env", []):
        name = entry["name"]
        if name in inherited and (_is_elsewhere(entry, place) or _is_undecided(entry)):
            continue
        value: str | None = overrides.get(name)
        if value is None:
            value = _value(pod, entry, variables, place)
        if value is not None:
            variables[name] = translate(value, paths)
    return variables


def _is_elsewhere(entry: dict[str, Any], place: HostBindings) -> bool:
    """The variable comes from a Secret that only a cluster has."""
    reference = (entry.get("valueFrom") or {}).get("secretKeyRef")
    return reference is not None and f"Secret/{reference['name']}" not in place.objects


def _is_undecided(entry: dict[str, Any]) -> bool:
    """The variable leaves to the place where it runs what it says."""
    return (entry["name"], entry.get("value")) in UNDECIDED.items()


def _value(
    pod: KubeObject, entry: dict[str, Any], env: Mapping[str, str], place: HostBindings
) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return expand(entry.get("value", ""), env)
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"])
    kind, reference = _reference(source)
    data = _data(place, kind, reference)
    if reference["key"] in data:
        return data[reference["key"]]
    if reference.get("optional"):
        return None
    raise PodError(
        f"{kind} {reference['name']} has no key {reference['key']} (for variable {entry['name']})"
    )


def _env_from(source: dict[str, Any], place: HostBindings) -> dict[str, str]:
    kind, field = (
        ("Secret", "secretRef") if "secretRef" in source else ("ConfigMap", "configMapRef")
    )
    return _data(place, kind, source[field])


def _reference(source: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
        if key in source:
            return kind, source[key]
    raise PodError(f"valueFrom {', '.join(source)} needs a cluster")


def _data(place: HostBindings, kind: str, reference: dict[str, Any]) -> dict[str, str]:
    stored = place.objects.get(f"{kind}/{reference['name']}")
    if stored is None and not reference.get("optional"):
        raise PodError(
            f"{kind} {reference['name']} does not exist in this run; "
            "set the variable on this machine, or in the template"
        )
    return object_data(stored or {})


def object_data(stored: KubeObject) -> dict[str, str]:
    """The texts of a config map or a secret."""
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


_LOOPBACK = "lo"
COLLECTIVES = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
"""Everybody of a run is on this machine. gloo and NCCL, left to themselves, listen on its network.
"""

NVLINK = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""On one machine ranks open each other's memory without these. Containers and virtual machines
often show GPUs whose fabric manager they cannot reach, and there NCCL's own choice ends with an
error. The host's environment goes first."""


def inherited_env() -> dict[str, str]:
    """The host's environment, but for the variables of a job that the host itself may
    be part of.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    unbuffered = {
        "PYTHONUNBUFFERED": "1"
    }  # a log that lags behind cannot tell why its process died
    return NVLINK | env | COLLECTIVES | unbuffered
