"""Statuses of jobs and pools at the API server, which are written with the version they are from.

The server refuses a write if the object has changed since it was read. That fences a leader that
does not know yet that it was replaced.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice.api import Model, manifest
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api, Listener, merge_patch, without_empty
from sluice_operator.cluster.kube.paths import path
from sluice_operator.cluster.kube.store import Store
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject, uid

Forget = Callable[[KubeObject], None]


async def write(
    api: Api, store: Store, stored: KubeObject, status: Model, warned: Listener, forget: Forget
) -> None:
    """Write a status, unless it is equal to the stored one.

    Parameters
    ----------
    api, store
        The API server, and the memory of the objects of this kind.
    stored
        The object, with its kind.
    status
        The new status.
    warned
        Called with the server's warnings.
    forget
        Called if the object is gone.

    """
    patch = merge_patch(stored.get("status") or {}, without_empty(manifest(status)))
    if not patch:
        return
    metadata = stored["metadata"]
    body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": patch}
    at = path(stored["kind"], metadata["namespace"], metadata["name"], "status")
    try:
        store.put(await api.merge(at, body, warned))
    except errors.ConflictError:
        await _reread(api, store, stored, forget)
        raise
    except errors.NotFoundError:
        forget(stored)


async def _reread(api: Api, store: Store, stored: KubeObject, forget: Forget) -> None:
    metadata = stored["metadata"]
    try:
        current = await api.get(path(stored["kind"], metadata["namespace"], metadata["name"]))
    except errors.NotFoundError:
        forget(stored)
        return
    if uid(current) != uid(stored):
        forget(stored)
    store.put(current)


def check_fresh(store: Store, owner: names.Owner) -> None:
    """Raise StaleError if the object has changed since the owner was made from it."""
    stored = store.newest((owner.metadata.namespace, owner.metadata.name))
    planned = (owner.metadata.model_extra or {}).get("resourceVersion")
    if (
        stored is None
        or uid(stored) != owner.metadata.uid
        or stored["metadata"]["resourceVersion"] != planned
    ):
        raise errors.StaleError(f"{owner.kind} {owner.key} has changed")
