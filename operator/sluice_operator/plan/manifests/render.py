"""Every object that a job starts with, for `sluice render` and for golden files."""

from __future__ import annotations

from sluice.api import RLJob, RLJobStatus
from sluice_operator.plan.decide.gangs import desired_gangs
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import Images, KubeObject, Observed
from sluice_operator.plan.manifests import queueing
from sluice_operator.plan.manifests.objects import supporting_objects
from sluice_operator.plan.manifests.optional_objects import extra_objects
from sluice_operator.plan.manifests.podgroup import group_objects, shared_group
from sluice_operator.plan.manifests.pods import gang_pods

OPERATOR_NAMESPACE = "sluice-system"


def render_all(job: RLJob, images: Images | None = None) -> list[KubeObject]:
    """All objects of the first attempt of every gang,
    for an operator in the namespace `sluice-system`.

    The rendezvous' address is its name in DNS here; the operator waits for the Service and writes
    its IP.
    """
    address = (
        f"{names.rendezvous_name(job)}.{job.metadata.namespace}.svc:{names.PORTS['rendezvous']}"
    )
    observed = Observed(status=job.status, operator_namespace=OPERATOR_NAMESPACE)
    objects = [*supporting_objects(job), *extra_objects(job, observed)]
    gangs = desired_gangs(job)
    shared = shared_group(job, job.status or RLJobStatus(), observed)
    groups = {gang: queueing.group_of(job, gang, 1, shared) for gang in gangs}
    pods = {
        gang: gang_pods(job, gang, 1, address, images or Images(), groups[gang]) for gang in gangs
    }
    return [
        *objects,
        *group_objects(job, groups, pods),
        *(pod for gang in gangs for pod in pods[gang]),
    ]
