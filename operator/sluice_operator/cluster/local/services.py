"""Services and container ports as ports of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sluice_operator.cluster.local.ports import free_port, is_free
from sluice_operator.cluster.local.translate import LOOPBACK
from sluice_operator.plan.facts.model import KubeObject


def has_address(manifest: KubeObject) -> bool:
    """A Service with an address of its own; a headless one only gives names in DNS, which a laptop
    has not.
    """
    return bool(manifest["kind"] == "Service" and manifest["spec"].get("clusterIP") != "None")


def accepted(manifest: KubeObject, ports: dict[str, int], taken: set[int]) -> KubeObject:
    """The object as it is stored: a Service gets this machine's address and a free port, which it
    keeps in `ports`.
    """
    if not has_address(manifest):
        return manifest
    name = manifest["metadata"]["name"]
    if name not in ports:
        ports[name] = free_port(taken)
    return with_address(manifest, ports[name])


def renew_addresses(objects: dict[str, KubeObject], ports: dict[str, int], taken: set[int]) -> None:
    """A port that somebody else took since the last run is replaced: no pod lives that could know
    the old one.
    """
    for name, port in ports.items():
        if not is_free(port):
            ports[name] = free_port(taken | set(ports.values()))
    for key, stored in objects.items():
        objects[key] = accepted(stored, ports, taken | set(ports.values()))


def with_address(service: KubeObject, port: int) -> KubeObject:
    spec = service["spec"]
    return {
        **service,
        "spec": {**spec, "clusterIP": LOOPBACK, "ports": [{**spec["ports"][0], "port": port}]},
    }


def pod_ports(pod: KubeObject, objects: Iterable[KubeObject], taken: set[int]) -> dict[str, int]:
    """Container port's name -> port of this machine: the Service's where one selects the pod, else
    a free one.
    """
    served = {}
    for stored in objects:
        if has_address(stored) and _selects(stored, pod):
            served[stored["spec"]["ports"][0]["targetPort"]] = stored["spec"]["ports"][0]["port"]
    result: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for name in (
            declared["name"] for declared in container.get("ports", []) if "name" in declared
        ):
            result[name] = served.get(name) or free_port(taken | set(result.values()))
    return result


def named_addresses(pod: KubeObject, ports: dict[str, int], taken: set[int]) -> dict[str, str]:
    """`POD.SUBDOMAIN:PORT` in the pod's arguments, which a cluster's DNS knows -> an address of
    this machine.

    The first pod that names one has a port promised for it, in `ports`; the pod that is meant
    listens there, since its arguments have the same text.
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


def _selects(service: KubeObject, pod: KubeObject) -> bool:
    selector: dict[str, str] = service["spec"].get("selector") or {}
    labels: dict[str, str] = pod["metadata"].get("labels", {})
    return bool(selector and selector.items() <= labels.items())
