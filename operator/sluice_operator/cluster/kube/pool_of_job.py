"""The RLEnginePool of a job, as the API server stores it."""

from __future__ import annotations

from pydantic import ValidationError

from sluice.api import RLJob
from sluice.api.pool import RLEnginePoolSpec
from sluice_operator.cluster.kube.store import Store
from sluice_operator.plan.decide.pools import in_cluster
from sluice_operator.plan.facts.model import KubeObject, PoolFacts
from sluice_operator.plan.report.pool_fit import absent, misfit


def facts(job: RLJob, pools: Store) -> PoolFacts | None:
    """Return the pool that the job names, and whether it can use it; None if it names none.

    pools: all pools of the cluster.
    """
    name = job.spec.rollout.pool
    if name is None:
        return None
    stored = pools.newest((job.metadata.namespace, name))
    return PoolFacts(name, problem=absent(job)) if stored is None else of_stored(job, name, stored)


def of_stored(job: RLJob, name: str, stored: KubeObject) -> PoolFacts:
    """Return the facts of a stored pool."""
    try:
        spec = RLEnginePoolSpec.model_validate(stored["spec"])
    except ValidationError as error:
        problem = f"rollout.pool: the RLEnginePool {name} is not valid: {error.errors()[0]['msg']}"
        return PoolFacts(name, problem=problem)
    if problem := misfit(job, spec):
        return PoolFacts(name, problem=problem)
    return in_cluster(job, spec.replicas)
