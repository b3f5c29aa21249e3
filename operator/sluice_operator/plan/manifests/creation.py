"""The pods that a pass creates, and the objects of the groups that they queue in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice.api import RLJob, RLJobStatus
from sluice_operator.plan.decide.gangs import Step
from sluice_operator.plan.defaults import with_defaults
from sluice_operator.plan.facts.model import Gang, Images, KubeObject, Observed, PodGroup
from sluice_operator.plan.manifests import podgroup, queueing
from sluice_operator.plan.manifests.objects import rendezvous_address
from sluice_operator.plan.manifests.pods import gang_pods


def groups_of(
    job: RLJob, status: RLJobStatus, steps: Sequence[Step]
) -> dict[Gang, PodGroup | None]:
    """The group by which a queue admits each gang's pods; None: they do not queue."""
    return {
        step.gang: queueing.group_of(job, step.gang, step.status.attempt, status.pod_group)
        for step in steps
    }


def missing_pods(
    job: RLJob,
    steps: Sequence[Step],
    groups: Mapping[Gang, PodGroup | None],
    observed: Observed,
    images: Images,
) -> tuple[KubeObject, ...]:
    """The pods to create, with their groups. They name the rendezvous by its address: they wait
    until it has one.
    """
    address = rendezvous_address(job, observed)
    if address is None:
        return ()
    job = with_defaults(job, observed.defaults)
    joined = {groups[step.gang] for step in steps if step.create and groups[step.gang] is not None}
    pods = {
        step.gang: gang_pods(
            job, step.gang, step.status.attempt, address, images, groups[step.gang]
        )
        for step in steps
        if step.create or groups[step.gang] in joined
    }
    wanted = podgroup.group_objects(job, {gang: groups[gang] for gang in pods}, pods)
    missing = [
        each for each in wanted if (each["kind"], each["metadata"]["name"]) not in observed.objects
    ]
    return (*missing, *(pods[step.gang][index] for step in steps for index in step.create))
