"""The pool of a job at an API server."""

from __future__ import annotations

import pytest

from sluice_operator.cluster.kube import pool_of_job
from sluice_operator.cluster.kube.store import Store, lean_job
from sluice_operator.plan import KubeObject
from tests.unit.operator.test_plan_pools import pooled
from tests.unit.operator.world import make_job

SPEC = {"model": {"path": "/models/tiny"}, "replicas": 2}


def pools(spec: KubeObject | None, namespace: str = "default") -> Store:
    """The memory of a cluster that has at most one pool, `shared`."""
    store = Store(
        lambda stored: (stored["metadata"]["namespace"], stored["metadata"]["name"]), lean_job
    )
    metadata = {"namespace": namespace, "name": "shared", "uid": "1", "resourceVersion": "1"}
    if spec is not None:
        store.put({"metadata": metadata, "spec": spec})
    return store


def test_the_engines_are_named_by_the_pool() -> None:
    facts = pool_of_job.facts(pooled(), pools(SPEC))
    assert facts is not None
    assert (facts.replicas, facts.problem) == (2, "")
    assert facts.addresses == (
        "shared-engine-0.shared-engines.default.svc:30000",
        "shared-engine-1.shared-engines.default.svc:30000",
    )


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        pytest.param(None, "there is no RLEnginePool shared in the namespace default", id="absent"),
        pytest.param(SPEC | {"maxRank": 4}, "up to rank 4", id="unfit"),
        pytest.param({}, "is not valid: Field required", id="of another version"),
    ],
)
def test_a_pool_that_cannot_be_used_says_why(spec: KubeObject | None, problem: str) -> None:
    facts = pool_of_job.facts(pooled(), pools(spec))
    assert facts is not None
    assert problem in facts.problem


def test_a_pool_of_another_namespace_is_not_that_of_the_job() -> None:
    facts = pool_of_job.facts(pooled(), pools(SPEC, namespace="other"))
    assert facts is not None
    assert "there is no RLEnginePool shared" in facts.problem


def test_other_jobs_have_no_pool() -> None:
    assert pool_of_job.facts(make_job(), pools(SPEC)) is None
