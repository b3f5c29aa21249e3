"""Objects that a job could run without: its budget for disruptions, its network policy, the groups
of its gangs.

They come and go while a job lives. An API server that does not know a budget or a policy runs the
job all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sluice.api import RLJob
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import Deletion, KubeObject, Observed
from sluice_operator.plan.manifests import disruption, network, queueing
from sluice_operator.plan.manifests.disruption import disruption_budget
from sluice_operator.plan.manifests.episodes import episode_policies
from sluice_operator.plan.manifests.network import network_policy

OPTIONAL = (disruption.KIND, network.KIND)


def extra_objects(job: RLJob, observed: Observed) -> tuple[KubeObject, ...]:
    """Budget and policy, as far as the spec wants them and the cluster knows them."""
    optional = (
        disruption_budget(job, job.spec.replicas),
        network_policy(job, observed.operator_namespace),
        *episode_policies(job),
    )
    return tuple(
        each for each in optional if each is not None and each["kind"] not in observed.absent_kinds
    )


def extra_keys(job: RLJob) -> tuple[tuple[str, str], ...]:
    """(kind, name) of what may be there, wanted or not."""
    return (
        (disruption.KIND, names.rollout_budget_name(job)),
        (network.KIND, names.network_policy_name(job)),
        *((network.KIND, names.episode_policy_name(job, role)) for role in names.EPISODES),
    )


def missing_extras(job: RLJob, observed: Observed) -> tuple[KubeObject, ...]:
    """The extras that are not there as they should be."""
    return tuple(
        wanted
        for wanted in extra_objects(job, observed)
        if not covers(
            observed.objects.get((wanted["kind"], wanted["metadata"]["name"])),
            wanted["spec"],
            "spec",
        )
    )


def unwanted_extras(
    job: RLJob, observed: Observed, groups: Collection[str] = ()
) -> tuple[Deletion, ...]:
    """Budget and policy that the spec does not want any more,
    and groups that have no pods any more.

    groups: those that go on, whose pods may not be there yet.
    """
    wanted = {(each["kind"], each["metadata"]["name"]) for each in extra_objects(job, observed)}
    unwanted = [key for key in extra_keys(job) if key in observed.objects and key not in wanted]
    return tuple(Deletion(kind, name) for kind, name in unwanted) + _old_groups(
        job, observed, groups
    )


def _old_groups(job: RLJob, observed: Observed, present: Collection[str]) -> tuple[Deletion, ...]:
    """A group goes after its pods: a scheduler would not know what to do with those
    that are left.
    """
    used = set(present) | {podstate.group(pod) or _of_attempt(job, pod) for pod in observed.pods}
    return tuple(
        Deletion(kind, name)
        for kind, name in observed.objects
        if kind == queueing.KIND and name not in used
    )


def _of_attempt(job: RLJob, pod: KubeObject) -> str:
    """The group of a pod that an older release has made: there was one for each
    attempt of a gang.
    """
    return names.attempt_name(job, podstate.role(pod), podstate.replica(pod), podstate.attempt(pod))


def covers(actual: Any, wanted: Any, field: str = "") -> bool:
    """`actual` says all that `wanted` says; an API server adds its defaults. field: look only below
    this one.
    """
    if field:
        return isinstance(actual, dict) and covers(actual.get(field), wanted)
    if isinstance(wanted, dict):
        return isinstance(actual, dict) and all(
            covers(actual.get(key), value) for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        same = isinstance(actual, Sequence) and len(actual) == len(wanted)
        return same and all(covers(left, right) for left, right in zip(actual, wanted, strict=True))
    return bool(actual == wanted)
