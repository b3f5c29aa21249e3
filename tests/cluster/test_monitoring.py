"""A real operator, scraped by the real Prometheus: what only a cluster can answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.boards import RULES, of_operator, queries
from tests.cluster.operators import Operator
from tests.cluster.world import World
from tests.prometheus import Prometheus, hastened

EMPTY = {
    "fleet: Time to running: median": "no job of this test ever trains",
    "fleet: Time to running: 95th percentile": "no job of this test ever trains",
}
"""Queries without an answer here, and why."""
QUERIES = [query for query in queries() if of_operator(query) and query.name not in EMPTY]
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
    rules.write_text(hastened(RULES.read_text(), waits="0s", windows={"1d": "10m"}))
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


async def test_an_operator_that_is_killed_leaves_no_leader(
    operator: Operator, prometheus: Prometheus
) -> None:
    await asyncio.to_thread(prometheus.until, lambda: healthy(prometheus), "leading")
    operator.kill()

    def labels() -> dict[str, str] | None:
        return prometheus.firing().get("SluiceOperatorWithoutLeader")

    assert await asyncio.to_thread(prometheus.until, labels, "firing", SECONDS)


def healthy(prometheus: Prometheus) -> bool:
    leading = prometheus.query("leader_election_master_status == 1")
    return bool(leading) and "SluiceOperatorWithoutLeader" not in prometheus.firing()
