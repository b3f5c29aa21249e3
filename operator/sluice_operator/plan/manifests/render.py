"""Every object that a job or a pool starts with, for `sluice render` and for golden files."""

from __future__ import annotations

from datetime import UTC, datetime

from sluice.api import RLEnginePool, RLJob, RLJobStatus
from sluice_operator.plan.decide.gangs import desired_gangs
from sluice_operator.plan.decide.pod_groups import group_of, job_group
from sluice_operator.plan.decide.pools import in_cluster
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.job_defaults import JobDefaults
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import Images, KubeObject, Observed
from sluice_operator.plan.manifests.engine_pool import pool_objects
from sluice_operator.plan.manifests.objects import supporting_objects
from sluice_operator.plan.manifests.optional_objects import extra_objects
from sluice_operator.plan.manifests.pods import gang_pods
from sluice_operator.plan.manifests.queueing import group_objects

OPERATOR_NAMESPACE = "sluice-system"


def render_pool(pool: RLEnginePool, images: Images | None = None) -> list[KubeObject]:
    """Return the objects of a pool; the key in its Secret is drawn when the operator makes it."""
    return list(pool_objects(pool, images or Images(), JobDefaults()))


def render_all(job: RLJob, images: Images | None = None) -> list[KubeObject]:
    """Return all objects of the first attempt of every gang.

    They are those of an operator in the namespace `sluice-system`, except for the address of the
    rendezvous: here it is a DNS name, whereas the operator waits for the Service and writes its IP.
    Of the workers of a job with a pool there are `rollout.replicas`, in place of one for each
    engine.
    """
    address = (
        f"{names.rendezvous_name(job)}.{job.metadata.namespace}.svc:{names.PORTS['rendezvous']}"
    )
    pool = in_cluster(job, job.spec.replicas) if job.spec.uses_pool else None
    observed = Observed(status=job.status, operator_namespace=OPERATOR_NAMESPACE, pool=pool)
    objects = [*supporting_objects(job), *extra_objects(job, observed)]
    gangs = desired_gangs(job)
    # No decision that is made here depends on the time.
    now = datetime.min.replace(tzinfo=UTC)
    admitted_by = job_group(JobPass(job, job.status or RLJobStatus(), observed, now))
    groups = {gang: group_of(job, gang, 1, admitted_by) for gang in gangs}
    pods = {
        gang: gang_pods(job, gang, 1, address, images or Images(), groups[gang], pool)
        for gang in gangs
    }
    return [
        *objects,
        *group_objects(job, groups, pods),
        *(pod for gang in gangs for pod in pods[gang]),
    ]
