"""Services, container ports and metrics targets as ports of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sluice.runtime import pod_env
from sluice_operator.cluster.local.pod import LocalPod
from sluice_operator.cluster.local.translate import LOOPBACK, PodError
from sluice_operator.plan.facts.model import KubeObject
from sluice_operator.plan.facts.names import LABEL_JOB, LABEL_POOL, LABEL_REPLICA, LABEL_ROLE

TARGETS_FILE = "targets.json"
# The path is a label too, because otherwise a worker's two targets would share their series `up`.
_ENGINE_LABELS = {"__metrics_path__": "/engine/metrics", "metrics_path": "/engine/metrics"}

# -- ports


def free_port(taken: set[int]) -> int:
    """Return a free port that is not in `taken`."""
    try:
        return pod_env.free_port(LOOPBACK, taken)
    except OSError as error:
        raise PodError(error.strerror) from error


def pod_ports(pod: KubeObject, objects: Iterable[KubeObject], taken: set[int]) -> dict[str, int]:
    """Return a port of this machine for each named container port of the pod.

    It is the Service's port if one selects the pod, and a free port otherwise.
    """
    served = {}
    for stored in objects:
        if has_address(stored) and _selects(stored, pod):
            served[stored["spec"]["ports"][0]["targetPort"]] = stored["spec"]["ports"][0]["port"]
    result: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            if "name" in port:
                free = served.get(port["name"]) or free_port(taken | set(result.values()))
                result[port["name"]] = free
    return result


def _selects(service: KubeObject, pod: KubeObject) -> bool:
    selector: dict[str, str] = service["spec"].get("selector") or {}
    labels: dict[str, str] = pod["metadata"].get("labels", {})
    return bool(selector and selector.items() <= labels.items())


# -- Services


def has_address(manifest: KubeObject) -> bool:
    """Return True for a Service with an address.

    A headless Service only gives DNS names, which a laptop does not have.
    """
    return bool(manifest["kind"] == "Service" and manifest["spec"].get("clusterIP") != "None")


def accepted(manifest: KubeObject, ports: dict[str, int], taken: set[int]) -> KubeObject:
    """Return the object as it is stored.

    A Service gets this machine's address and a free port, which is added to `ports`.
    """
    if not has_address(manifest):
        return manifest
    name = manifest["metadata"]["name"]
    if name not in ports:
        ports[name] = free_port(taken)
    return with_address(manifest, ports[name])


def renew_addresses(objects: dict[str, KubeObject], ports: dict[str, int], taken: set[int]) -> None:
    """Replace ports that another program took since the last run.

    No pod of that run is alive, so the old port is not in use.
    """
    for name, port in ports.items():
        if not pod_env.is_free(port):
            ports[name] = free_port(taken | set(ports.values()))
    for key, stored in objects.items():
        objects[key] = accepted(stored, ports, taken | set(ports.values()))


def with_address(service: KubeObject, port: int) -> KubeObject:
    spec = service["spec"]
    return {
        **service,
        "spec": {**spec, "clusterIP": LOOPBACK, "ports": [{**spec["ports"][0], "port": port}]},
    }


def named_addresses(pod: KubeObject, ports: dict[str, int], taken: set[int]) -> dict[str, str]:
    """Map each `POD.SUBDOMAIN:PORT` in the pod's arguments to an address of this machine.

    A cluster's DNS would resolve these names. The first pod that mentions one reserves a port for
    it, which is added to `ports`; the pod that is meant listens there, because the same text is in
    its arguments.
    """
    subdomain = pod["spec"].get("subdomain")
    if not subdomain:
        return {}
    words = [word for container in pod["spec"]["containers"] for word in container.get("args", [])]
    pattern = re.compile(rf"[a-z0-9-]+\.{re.escape(subdomain)}:\d+")
    texts = sorted({text for word in words for text in pattern.findall(word)})
    for text in texts:
        if text not in ports:
            ports[text] = free_port(taken | set(ports.values()))
    return {text: f"{LOOPBACK}:{ports[text]}" for text in texts}


# -- metrics targets


def write_targets(directory: Path, pods: Iterable[LocalPod]) -> None:
    """Write targets.json, with which a Prometheus finds the running pods (`file_sd_configs`)."""
    by_name = sorted(pods, key=lambda pod: pod.name)
    groups = [group for pod in by_name for group in _target_groups(pod)]
    path = directory / TARGETS_FILE
    text = json.dumps(groups, indent=2) + "\n"
    if path.exists() and path.read_text() == text:
        return
    # Replaced as a whole, because Prometheus reads the file whenever it changes.
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def _target_groups(pod: LocalPod) -> Iterator[dict[str, Any]]:
    """Yield the targets of a pod that runs, with the labels that a cluster's PodMonitor gives."""
    if pod.ended or "metrics" not in pod.ports:
        return
    metadata = pod.manifest["metadata"]
    labels = {
        "job": metadata["labels"][LABEL_JOB],
        "namespace": metadata["namespace"],
        "role": metadata["labels"][LABEL_ROLE],
        "replica": metadata["labels"][LABEL_REPLICA],
        "pod": pod.name,
    }
    targets = [f"{LOOPBACK}:{pod.ports['metrics']}"]
    yield {"targets": targets, "labels": labels}
    # An engine of a pool has the metrics of all its jobs.
    if labels["role"] == "rollout" and LABEL_POOL not in metadata["labels"]:
        yield {"targets": targets, "labels": labels | _ENGINE_LABELS}
