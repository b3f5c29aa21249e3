"""Waiting requests of a pool's jobs: the job that has had the least comes first."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.unit.engines.conftest import Plugin


@pytest.fixture
def fair_shares(plugin: Plugin) -> Any:
    return plugin("fair_shares").FairShares


@dataclass(eq=False)
class Request:
    """A request as SGLang's scheduler has it."""

    rid: str
    prompt: int = 10
    length: int = 20
    output_ids: list[int] = field(default_factory=list)

    @property
    def origin_input_ids(self) -> list[int]:
        return [0] * self.prompt

    def finished(self) -> bool:
        return len(self.output_ids) >= self.length


def serve(shares: Any, arrivals: list[list[Request]], slots: int) -> list[Request]:
    """Let an engine with so many slots make a token of each request in each pass.

    arrivals: the requests that come before each pass. Returns the requests in the order of their
    ends.
    """
    waiting: list[Request] = []
    running: list[Request] = []
    ended: list[Request] = []
    while arrivals or waiting or running:
        waiting += arrivals.pop(0) if arrivals else []
        if waiting and len(running) < slots:
            shares.order(None, None, waiting)
            free = slots - len(running)
            running += waiting[:free]
            del waiting[:free]
        for request in running:
            request.output_ids.append(1)
        ended += [request for request in running if request.finished()]
        running = [request for request in running if not request.finished()]
    return ended


def requests(tag: str, count: int, length: int = 20) -> list[Request]:
    return [Request(f"{tag}!{number}", length=length) for number in range(count)]


def test_a_job_that_comes_late_is_served_next(fair_shares: Any) -> None:
    many, few = requests("team/many:1", 40), requests("team/few:1", 2)
    ended = serve(fair_shares(), [many, few], slots=4)
    assert max(ended.index(request) for request in few) < 12


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 4)])
def test_tokens_are_shared_by_weight(fair_shares: Any, weights: tuple[int, int]) -> None:
    """Also if one job's requests are three times as long."""
    first = requests(f"team/first:{weights[0]}", 400)
    second = requests(f"team/second:{weights[1]}", 400, length=60)
    ended = serve(fair_shares(), [first + second], slots=6)
    # While both have requests.
    last = min(max(ended.index(request) for request in jobs[-40:-39]) for jobs in (first, second))
    tokens = [
        sum(request.length for request in ended[:last] if request.rid.startswith(name))
        for name in ("team/first", "team/second")
    ]
    assert tokens[0] / tokens[1] == pytest.approx(weights[0] / weights[1], rel=0.3)


def test_a_job_saves_nothing_up(fair_shares: Any) -> None:
    """One that comes back after a pause does not get everything until it has caught up."""
    busy = requests("team/busy:1", 200)
    pause: list[list[Request]] = [[] for _ in range(500)]
    back = requests("team/back:1", 30)
    ended = serve(fair_shares(), [busy, *pause, back], slots=4)
    first = ended.index(back[0])
    share = sum(request in back for request in ended[first : first + 40])
    assert 12 <= share <= 28


def test_requests_of_one_job_keep_their_order(fair_shares: Any) -> None:
    only = requests("team/only:1", 20)
    assert serve(fair_shares(), [only], slots=1) == only


def test_every_token_is_accounted_once(fair_shares: Any) -> None:
    counted: dict[tuple[str, str], int] = {}

    def account(job: str, kind: str, tokens: int) -> None:
        counted[job, kind] = counted.get((job, kind), 0) + tokens

    shares, draws = fair_shares(account), random.Random(0)
    jobs = {
        f"team/{name}": [
            Request(f"team/{name}:1!{n}", draws.randint(1, 50), draws.randint(1, 30))
            for n in range(30)
        ]
        for name in ("a", "b")
    }
    serve(shares, [[*jobs["team/a"], *jobs["team/b"]]], slots=3)
    shares.count([])
    for name, those in jobs.items():
        assert counted[name, "prompt"] == sum(request.prompt for request in those)
        assert counted[name, "generated"] == sum(request.length for request in those)
    assert not shares._open, "requests that have ended are forgotten"


def test_tokens_and_waiting_requests_are_shown_while_no_request_may_begin(plugin: Plugin) -> None:
    """As in a full engine, and in one whose queue is empty."""
    adapter, registry = plugin("weights.adapter"), CollectorRegistry()
    store = plugin("weights.adapter_store").AdapterStore(8, 1, pool=True)
    store.metrics = plugin("adapter_metrics").AdapterMetrics(pool=True, registry=registry)
    adapters = adapter.Adapters(store)
    adapters.shares.account = store.metrics.had
    waiting = [*requests("team/many:1", 3), *requests("team/few:4", 1)]
    scheduler = SimpleNamespace(waiting_queue=waiting)

    def passes() -> None:
        for _ in range(adapter.COUNTED_PASSES):
            adapters.count(None, scheduler)

    def shown(name: str, job: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"job": job, **labels})

    passes()
    assert shown("sluice_pool_requests_waiting", "team/many") == 3
    running, scheduler.waiting_queue = waiting[0], waiting[1:]
    running.output_ids += [1] * 7
    passes()
    assert shown("sluice_pool_requests_waiting", "team/many") == 2
    assert shown("sluice_pool_tokens_total", "team/many", kind="generated") == 7
    assert shown("sluice_pool_job_weight", "team/few") == 4
    scheduler.waiting_queue = []
    passes()
    assert shown("sluice_pool_requests_waiting", "team/many") == 0


def test_requests_that_are_aborted_before_they_begin_leave_nothing(plugin: Plugin) -> None:
    """SGLang takes them out of its queue, and never marks them as finished."""
    adapter = plugin("weights.adapter")
    adapters = adapter.Adapters(plugin("weights.adapter_store").AdapterStore(8, 1, pool=True))
    aborted, other = requests("team/aborted:1", 5), requests("team/other:1", 2)
    scheduler = SimpleNamespace(waiting_queue=[*aborted, *other])
    shares = adapters.shares
    shares.order(None, None, scheduler.waiting_queue)

    def abort(scheduler: Any, _: Any) -> None:
        scheduler.waiting_queue = other

    adapters.abort(abort, scheduler, None)
    shares.count(scheduler.waiting_queue)
    assert [tracked.request for tracked in shares._open.values()] == other
    assert shares.counters == {"team/aborted": 0, "team/other": 0}, "none has had a token"
