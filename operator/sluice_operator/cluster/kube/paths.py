"""Where objects live in the API."""

from __future__ import annotations

from sluice.api import GROUP, PLURAL, VERSION

_PLACES = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Event": ("/apis/events.k8s.io/v1", "events"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Pod": ("/api/v1", "pods"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "PodGroup": ("", "podgroups"),
    "RLJob": (f"/apis/{GROUP}/{VERSION}", PLURAL),
    "ResourceClaim": ("/apis/resource.k8s.io/v1", "resourceclaims"),
    "Sandbox": ("", "sandboxes"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    "Workload": ("", "workloads"),
}
RLJOBS = f"/apis/{GROUP}/{VERSION}"


def collection(kind: str, namespace: str | None, group_version: str = "") -> str:
    """All objects of a kind in a namespace; None: in all of them. group_version: of a kind that
    several groups have.
    """
    root, plural = _PLACES[kind]
    root = f"/apis/{group_version}" if group_version else root
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


def path(
    kind: str, namespace: str, name: str, subresource: str = "", *, group_version: str = ""
) -> str:
    return f"{collection(kind, namespace, group_version)}/{name}" + (
        f"/{subresource}" if subresource else ""
    )
