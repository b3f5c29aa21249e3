"""Workers of a job whose engines are those of an RLEnginePool.

A worker belongs to one engine of the pool, so the job has as many workers as the pool has engines.
"""

from __future__ import annotations

from sluice.api import RLJob, RLJobStatus
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import PoolFacts


def with_workers(job: RLJob, pool: PoolFacts | None, status: RLJobStatus | None) -> RLJob:
    """Return the job with `rollout.replicas` set to the number of its pool's engines.

    While there is a problem with the pool, the job keeps the workers that it has.
    """
    if not job.spec.uses_pool:
        return job
    if pool is None or pool.problem:
        replicas = (status.rollout_replicas if status else None) or 0
    else:
        replicas = pool.replicas
    rollout = job.spec.rollout.model_copy(update={"replicas": replicas})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"rollout": rollout})})


def in_cluster(job: RLJob, replicas: int) -> PoolFacts:
    """Return the facts of a pool with these engines in the job's namespace."""
    pool = job.spec.rollout.pool
    assert pool is not None
    addresses = (
        names.pool_engine_address(job.metadata.namespace, pool, engine)
        for engine in range(replicas)
    )
    return PoolFacts(pool, replicas, tuple(addresses))
