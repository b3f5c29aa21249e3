"""A real operator, scraped by a real Prometheus.

The tests cover what only a cluster can show, and the alerts that only faults of an operator fire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_operator.cluster.kube.paths import collection, path
from tests.boards import RULES, of_operator, queries
from tests.cluster.conftest import StartOperator
from tests.cluster.operators import Operator
from tests.cluster.queues import Volcano
from tests.cluster.test_queues import policy, submit, whole_job_runs  # noqa: F401 - a fixture
from tests.cluster.world import World
from tests.prometheus import Labels, Prometheus, hastened

# Queries without an answer here, and why.
EMPTY = {
    "fleet: Time to running: median": "no job of this test ever trains",
    "fleet: Time to running: 95th percentile": "no job of this test ever trains",
    "fleet: Jobs: Speedup of best split": "and none has GPUs",
    "job: Speedup of the fastest split: speedup": "and none has GPUs",
    "job: Fastest split: {{role}}": "and none has GPUs",
}
QUERIES = [query for query in queries() if of_operator(query) and query.name not in EMPTY]
# An hour is long enough for four restarts, whose pauses double: 1, 2, 4 and 8 s.
WINDOWS = {"1d": "10m", "1h": "60s", "10m": "10s"}
SECONDS = 30.0


async def until_answers(prometheus: Prometheus, expr: str) -> bool:
    end = asyncio.get_running_loop().time() + SECONDS
    while asyncio.get_running_loop().time() < end:
        if await asyncio.to_thread(prometheus.query, expr):
            return True
        await asyncio.sleep(0.2)
    return False


@pytest.fixture
def prometheus(operator: Operator, tmp_path: Path) -> Iterator[Prometheus]:
    rules = tmp_path / "rules.yaml"
    rules.write_text(hastened(RULES.read_text(), waits="0s", windows=WINDOWS))
    targets = {"targets": [f"127.0.0.1:{operator.port}"], "labels": {"namespace": "sluice-system"}}
    scrape = {"job_name": "sluice-metrics", "honor_labels": True, "static_configs": [targets]}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [scrape],
    }
    with Prometheus(tmp_path, configuration) as server:
        yield server


async def test_every_query_about_the_operator_answers(
    world: World, operator: Operator, prometheus: Prometheus
) -> None:
    """Two jobs, one after the other: of a first pass Prometheus sees the end alone, no increase."""
    await world.create()
    passes = 'sum(controller_runtime_reconcile_time_seconds_count{controller="rljob"}) > 0'
    assert await until_answers(prometheus, passes)
    await world.create("second")
    silent = []
    for query in QUERIES:
        expr = query.filled(namespace=world.namespace, job="demo", interval="1m")
        if not await until_answers(prometheus, expr):
            silent.append(query.name)
    assert silent == []


async def test_a_jobs_series_have_the_jobs_own_namespace(
    world: World, operator: Operator, prometheus: Prometheus
) -> None:
    """And not that of the operator, which scraped them."""
    await world.create()
    state = f'namespace_job:sluice_job:state{{namespace="{world.namespace}",job="demo"}}'
    assert await until_answers(prometheus, state)
    assert prometheus.query('{__name__=~".+",exported_namespace!=""}') == []


async def firing(prometheus: Prometheus, alert: str) -> Labels:
    return await asyncio.to_thread(prometheus.until_firing, alert)


async def quiet(prometheus: Prometheus, alert: str) -> None:
    await asyncio.to_thread(prometheus.until_quiet, alert)


async def test_an_operator_that_is_killed_leaves_no_leader_until_another_one_leads(
    start: StartOperator, operator: Operator, prometheus: Prometheus
) -> None:
    leads = "leader_election_master_status == 1"
    assert await until_answers(prometheus, leads)
    await quiet(prometheus, "SluiceOperatorWithoutLeader")
    operator.kill()
    await firing(prometheus, "SluiceOperatorWithoutLeader")
    await start(SLUICE_HTTP_PORT=str(operator.port), SLUICE_IDENTITY="two")
    assert await until_answers(prometheus, leads)
    await quiet(prometheus, "SluiceOperatorWithoutLeader")


async def test_an_engine_that_crashes_again_and_again(
    world: World, operator: Operator, prometheus: Prometheus
) -> None:
    await world.running(5, failurePolicy={"rolloutBackoffSeconds": 1})
    await quiet(prometheus, "SluiceRestarts")
    attempt = 1
    while "SluiceRestarts" not in prometheus.firing():
        assert attempt < 20
        await crash(world, attempt)
        attempt += 1
    labels = await firing(prometheus, "SluiceRestarts")
    assert (labels["namespace"], labels["job"]) == (world.namespace, "demo")
    assert labels["role"] == "rollout"
    await quiet(prometheus, "SluiceRestarts")


async def crash(world: World, attempt: int) -> None:
    """The first engine fails; until its successor runs."""
    await world.finish(f"demo-rollout-0-{attempt}-0", 1, "error: out of memory", "engine")

    async def is_replaced() -> bool:
        return f"demo-rollout-0-{attempt + 1}-0" in await world.names()

    await world.until(is_replaced)
    await world.run()


@pytest.mark.parametrize("policy", ["volcano"], indirect=True)
async def test_a_job_that_waits_in_its_queue(
    world: World,
    operator: Operator,
    prometheus: Prometheus,
    policy: str,  # noqa: F811
) -> None:
    queue = Volcano(world, quota=0)
    async with queue.working():
        await submit(world, policy, "demo")
        labels = await firing(prometheus, "SluiceQueueTooLong")
        assert (labels["namespace"], labels["job"]) == (world.namespace, "demo")
        queue.quota = 2
        await whole_job_runs(world, "demo")
        await quiet(prometheus, "SluiceQueueTooLong")


async def test_passes_that_fail(world: World, operator: Operator, prometheus: Prometheus) -> None:
    """The name that a job's configuration needs is somebody else's."""
    await quiet(prometheus, "SluiceReconcileErrors")
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo-config"}}
    await world.api.create(collection("ConfigMap", world.namespace), theirs)
    await world.create()
    labels = await firing(prometheus, "SluiceReconcileErrors")
    assert labels["namespace"] == "sluice-system"
    await world.api.delete(path("ConfigMap", world.namespace, "demo-config"), {})
    await world.until_pods(5)
    await quiet(prometheus, "SluiceReconcileErrors")
