"""The pool of a job at an API server."""

from __future__ import annotations

from typing import cast

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube import pools
from sluice_operator.cluster.kube.api import Api
from sluice_operator.plan import KubeObject
from tests.unit.operator.test_plan_pools import pooled
from tests.unit.operator.world import make_job

POOL: KubeObject = {"spec": {"model": {"path": "/models/tiny"}, "replicas": 2}}


class Server:
    """An API server that has at most the one object that is asked for."""

    def __init__(self, stored: KubeObject | None) -> None:
        self.stored, self.requests = stored, list[str]()

    async def get(self, path: str) -> KubeObject:
        self.requests.append(path)
        if self.stored is None:
            raise errors.NotFoundError("not found", 404)
        return self.stored


async def test_the_pool_is_read_from_the_namespace_of_the_job() -> None:
    server = Server(POOL)
    facts = await pools.facts(cast(Api, server), pooled())
    assert server.requests == ["/apis/sluice.dev/v1alpha1/namespaces/default/rlenginepools/shared"]
    assert facts is not None
    assert (facts.replicas, facts.problem) == (2, "")
    assert facts.addresses == (
        "shared-engine-0.shared-engines.default.svc:30000",
        "shared-engine-1.shared-engines.default.svc:30000",
    )


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        pytest.param(None, "there is no RLEnginePool shared in the namespace default", id="absent"),
        pytest.param({"spec": POOL["spec"] | {"maxRank": 4}}, "up to rank 4", id="unfit"),
        pytest.param({"spec": {}}, "is not valid: Field required", id="of another version"),
    ],
)
async def test_a_pool_that_cannot_be_used_says_why(stored: KubeObject | None, problem: str) -> None:
    facts = await pools.facts(cast(Api, Server(stored)), pooled())
    assert facts is not None
    assert problem in facts.problem


async def test_other_jobs_ask_for_no_pool() -> None:
    server = Server(None)
    assert await pools.facts(cast(Api, server), make_job()) is None
    assert not server.requests
