"""Objects that come and go while a job lives: disruption budget, network policies, pod groups.

An API server that does not know disruption budgets or network policies runs the job without them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sluice.api import RLEnginePool, RLJob
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import Deletion, KubeObject, Observed
from sluice_operator.plan.manifests import network
from sluice_operator.plan.manifests.episodes import episode_policies
from sluice_operator.plan.manifests.network import network_policy, pool_policy

DISRUPTION_BUDGET = "PodDisruptionBudget"
# Kinds that a cluster may lack.
OPTIONAL = (DISRUPTION_BUDGET, network.KIND)


def extra_objects(job: RLJob, observed: Observed) -> tuple[KubeObject, ...]:
    """Return the budget and the policies that the spec asks for and the cluster knows."""
    optional = (
        disruption_budget(job, job.spec.replicas),
        network_policy(job, observed.operator_namespace),
        pool_policy(job),
        *episode_policies(job),
    )
    return tuple(
        manifest
        for manifest in optional
        if manifest is not None and manifest["kind"] not in observed.absent_kinds
    )


def extra_keys(job: RLJob) -> tuple[tuple[str, str], ...]:
    """Return (kind, name) of the budget and the policies that may exist, desired or not."""
    return (
        (DISRUPTION_BUDGET, names.rollout_budget_name(job)),
        (network.KIND, names.network_policy_name(job)),
        (network.KIND, names.pool_policy_name(job)),
        *((network.KIND, names.episode_policy_name(job, role)) for role in names.EPISODES),
    )


def missing_extras(job: RLJob, observed: Observed) -> tuple[KubeObject, ...]:
    """Return the budget and the policies that are missing or differ from the spec."""
    return tuple(
        manifest
        for manifest in extra_objects(job, observed)
        if not covers(
            observed.objects.get((manifest["kind"], manifest["metadata"]["name"])),
            manifest["spec"],
            "spec",
        )
    )


def unwanted_extras(
    job: RLJob, observed: Observed, groups: Collection[str] = ()
) -> tuple[Deletion, ...]:
    """Delete a budget and policies that the spec no longer asks for, and groups without pods.

    groups: names of groups to keep, whose pods may not exist yet.
    """
    desired = {
        (manifest["kind"], manifest["metadata"]["name"])
        for manifest in extra_objects(job, observed)
    }
    unwanted = [key for key in extra_keys(job) if key in observed.objects and key not in desired]
    return tuple(Deletion(kind, name) for kind, name in unwanted) + _old_groups(
        job, observed, groups
    )


def _old_groups(job: RLJob, observed: Observed, present: Collection[str]) -> tuple[Deletion, ...]:
    """Delete groups after their pods: a scheduler could not place pods whose group is gone."""
    used = set(present) | {podstate.group(pod) or _old_group(job, pod) for pod in observed.pods}
    return tuple(
        Deletion(kind, name)
        for kind, name in observed.objects
        if kind == names.POD_GROUP and name not in used
    )


def _old_group(job: RLJob, pod: KubeObject) -> str:
    # Older releases made a group for each attempt of a gang, and did not label its pods.
    return names.attempt_name(job, podstate.role(pod), podstate.replica(pod), podstate.attempt(pod))


def covers(actual: Any, desired: Any, field: str = "") -> bool:
    """Return True if `actual` says all that `desired` says; an API server adds its defaults.

    field: compare `desired` with this field of `actual`.
    """
    if field:
        return isinstance(actual, dict) and covers(actual.get(field), desired)
    if isinstance(desired, dict):
        return isinstance(actual, dict) and all(
            covers(actual.get(key), value) for key, value in desired.items()
        )
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        same = isinstance(actual, Sequence) and len(actual) == len(desired)
        return same and all(
            covers(left, right) for left, right in zip(actual, desired, strict=True)
        )
    return bool(actual == desired)


def disruption_budget(job: RLJob, replicas: int) -> KubeObject | None:
    """Return the budget for what a drain of nodes may evict at once.

    Only engines have a budget: one engine stays until another is ready, so that training goes on
    while nodes are upgraded one after the other. All other gangs are needed whole, so a budget for
    them would either allow everything or block the node until the job ends. An evicted trainer
    checkpoints between two steps, within its grace period, and continues elsewhere; a buffer
    continues from its storage.

    Parameters
    ----------
    job
        The job.
    replicas
        Number of engines that should run.

    Returns
    -------
    The budget, or None if the spec disables it or there is only one engine.

    """
    if not job.spec.pod_disruption_budget.enabled or replicas < 2:
        return None
    # A number of pods, because `maxUnavailable` is counted against /scale, which knows engines and
    # not pods.
    pods = job.spec.rollout.nodes_per_replica
    return _budget(job, names.rollout_budget_name(job), pods, names.selector(job, "rollout"))


def pool_budget(pool: RLEnginePool) -> KubeObject | None:
    """Return the budget that keeps one engine of a pool; None if there is only one engine."""
    if pool.spec.replicas < 2:
        return None
    name, pods = names.pool_engine_name(pool.metadata.name), names.selector(pool, names.ENGINE)
    return _budget(pool, name, 1, pods)


def _budget(owner: names.Owner, name: str, available: int, pods: dict[str, str]) -> KubeObject:
    return {
        "apiVersion": "policy/v1",
        "kind": DISRUPTION_BUDGET,
        "metadata": names.metadata(owner, name),
        "spec": {
            "minAvailable": available,
            "selector": {"matchLabels": pods},
            # An engine that is not ready (it loads its model, or fails again and again) does not
            # hold up a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
