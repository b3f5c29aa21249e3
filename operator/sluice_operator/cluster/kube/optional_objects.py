"""Disruption budgets, network policies and pod groups of jobs and pools at the API server.

Not every API server serves these kinds. A job runs without a budget or a policy that cannot be
created. A job that asks for the groups of a scheduler that is not installed cannot run, and its
status says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.api import RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.kube.store import owner_uid
from sluice_operator.plan import Event
from sluice_operator.plan.decide.pod_groups import group_version
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject
from sluice_operator.plan.manifests.optional_objects import OPTIONAL, extra_keys

KINDS = (*OPTIONAL, names.POD_GROUP)


@dataclass(frozen=True, slots=True)
class OptionalObjects:
    """The optional objects of a job or a pool."""

    objects: dict[tuple[str, str], KubeObject] = field(default_factory=dict)  # by (kind, name)
    absent: frozenset[str] = frozenset()  # kinds that the API server does not serve


async def read(api: Api, job: RLJob) -> OptionalObjects:
    """Read the budget and the policies of a job by name, and list the groups.

    Groups of older attempts may be left.
    """
    named = await read_named(api, extra_keys(job), job.metadata.namespace)
    return OptionalObjects(named.objects | await _groups(api, job), named.absent)


async def read_named(api: Api, keys: Sequence[tuple[str, str]], namespace: str) -> OptionalObjects:
    """Read objects by (kind, name)."""
    answers = await asyncio.gather(*(_get(api, kind, name, namespace) for kind, name in keys))
    objects = {
        key: answer for key, answer in zip(keys, answers, strict=True) if isinstance(answer, dict)
    }
    absent = {
        kind
        for (kind, _), answer in zip(keys, answers, strict=True)
        if answer is errors.MissingApiError
    }
    return OptionalObjects(objects, frozenset(absent))


def location(owner: names.Owner, kind: str, name: str) -> str:
    return path(kind, owner.metadata.namespace, name, group_version=_group_version(owner, kind))


def missing(absent: frozenset[str]) -> Event:
    text = (
        f"this API server has no {' and no '.join(sorted(absent))} of the version that is needed; "
        "the job runs without"
    )
    return Event("Warning", "ApiMissing", text)


async def _get(
    api: Api, kind: str, name: str, namespace: str
) -> KubeObject | type[errors.MissingApiError] | None:
    try:
        return await api.get(path(kind, namespace, name))
    except errors.MissingApiError:
        return errors.MissingApiError
    except errors.NotFoundError:
        return None


async def _groups(api: Api, job: RLJob) -> dict[tuple[str, str], KubeObject]:
    version = _group_version(job, names.POD_GROUP)
    if not version:
        return {}
    at = collection(names.POD_GROUP, job.metadata.namespace, version)
    groups: dict[tuple[str, str], KubeObject] = {}
    # If the kind is not served, the creation of the first group reports it.
    with contextlib.suppress(errors.MissingApiError):
        async for page in api.pages(at, names.selector_text(names.selector(job))):
            owned = [item for item in page["items"] or [] if owner_uid(item) == job.metadata.uid]
            groups |= {
                (names.POD_GROUP, item["metadata"]["name"]): {**item, "kind": names.POD_GROUP}
                for item in owned
            }
    return groups


def _group_version(owner: names.Owner, kind: str) -> str:
    if kind != names.POD_GROUP or not isinstance(owner, RLJob):
        return ""
    return group_version(owner) or ""
