"""Where objects live in the API."""

from __future__ import annotations

from sluice.api import GROUP, PLURAL, VERSION

_PLACES = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Event": ("/apis/events.k8s.io/v1", "events"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Pod": ("/api/v1", "pods"),
    "RLJob": (f"/apis/{GROUP}/{VERSION}", PLURAL),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
}
RLJOBS = f"/apis/{GROUP}/{VERSION}"


def collection(kind: str, namespace: str | None) -> str:
    """All objects of a kind in a namespace; None: in all of them."""
    root, plural = _PLACES[kind]
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


def path(kind: str, namespace: str, name: str, subresource: str = "") -> str:
    return f"{collection(kind, namespace)}/{name}" + (f"/{subresource}" if subresource else "")
