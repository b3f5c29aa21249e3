"""URL paths of objects in the Kubernetes API."""

from __future__ import annotations

from sluice.api import GROUP, PLURAL, VERSION, pool

_COLLECTIONS = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Event": ("/apis/events.k8s.io/v1", "events"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Pod": ("/api/v1", "pods"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "PodGroup": ("", "podgroups"),
    pool.KIND: (f"/apis/{GROUP}/{VERSION}", pool.PLURAL),
    "RLJob": (f"/apis/{GROUP}/{VERSION}", PLURAL),
    "ResourceClaim": ("/apis/resource.k8s.io/v1", "resourceclaims"),
    "Sandbox": ("", "sandboxes"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Workload": ("", "workloads"),
}
RLJOBS = f"/apis/{GROUP}/{VERSION}"


def collection(kind: str, namespace: str | None, group_version: str = "") -> str:
    """Return the path of all objects of a kind.

    Parameters
    ----------
    kind
        The kind of the objects.
    namespace
        Their namespace; None for all namespaces.
    group_version
        The API group and version, for a kind that several groups have.

    """
    root, plural = _COLLECTIONS[kind]
    root = f"/apis/{group_version}" if group_version else root
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


def path(
    kind: str, namespace: str, name: str, subresource: str = "", *, group_version: str = ""
) -> str:
    return f"{collection(kind, namespace, group_version)}/{name}" + (
        f"/{subresource}" if subresource else ""
    )
