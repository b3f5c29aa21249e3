"""An error is the group's at which it happened. An engine that is gone, or answers errors alone,
ends the worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.http import client as engine_module
from sluice.engines.sglang.client import Client
from sluice.samples.sample import SampleGroup, SampleStatus
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout import metrics
from sluice_rollout.leased_group import LeasedGroup
from sluice_rollout.worker import Worker, WorkerError
from tests.integration.engines import Sglang
from tests.integration.proxy import Answer, Delay, Drop, Fate, ProxiedRequest, Proxy
from tests.integration.rollout.pods import Services, leases, submitted

READY = pb.TakeBatchResponse.STATE_READY
WORD = 8  # id of w0000
PATIENCE = 60.0
LONG = {"rollout__sampling__maxResponseTokens": 3000}


@asynccontextmanager
async def proxied(sglang: Sglang) -> AsyncIterator[tuple[Proxy, Client]]:
    async with Proxy(sglang.url) as proxy, Client(proxy.url) as engine:
        await engine.wait_ready(10)
        yield proxy, engine


def failed(reason: str) -> float:
    return float(metrics.GROUP_FAILURES.labels(reason=reason)._value.get())


@asynccontextmanager
async def running(
    services: Services, engine: Client
) -> AsyncIterator[tuple[Worker, Returns, asyncio.Task[None]]]:
    """A worker at work, what it gives back, and its run."""
    async with services.worker(engine) as (worker, membership):
        returns, stop = Returns(worker), asyncio.Event()
        work = asyncio.create_task(worker.run(stop))
        await asyncio.wait_for(membership.connected.wait(), 10)
        await services.rendezvous.serve(0)
        try:
            yield worker, returns, work
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.wait({work}), 40)


class Returns:
    """Notes groups that go back to the buffer, and passes them on."""

    def __init__(self, worker: Worker) -> None:
        self.groups: list[SampleGroup] = []
        self._send = worker.submitter.returns.send
        worker.submitter.returns.send = self.send  # type: ignore[method-assign]

    async def send(self, group: SampleGroup) -> Any:
        self.groups.append(group)
        return await self._send(group)

    @property
    def failures(self) -> dict[int, str]:
        return {group.group_id: group.failure for group in self.groups}


@pytest.mark.parametrize(
    ("fate", "times"),
    [
        pytest.param(Answer(500, "oops"), 2, id="500"),
        pytest.param(
            Drop(after=True), 3, id="broken connection"
        ),  # two samples, and one is sent anew
    ],
)
async def test_a_hiccup_of_the_engine_is_nobodys_failure(
    make_services: Callable[..., Services], sglang: Sglang, tmp_path: Path, fate: Fate, times: int
) -> None:
    services = make_services(**words(tmp_path))
    left = list(range(times))
    async with proxied(sglang) as (proxy, engine), await services.start_buffer() as client:
        proxy.rules.append(
            lambda request: fate if of_row(request, 2) and left and left.pop() >= 0 else None
        )
        async with services.working(engine) as (_, end):
            assert (await client.take(1, wait=PATIENCE)).state == READY
            await end()
        assert (await client.stats()).counters["groups_returned"] == 0
    assert not left


async def test_a_request_that_the_engine_cannot_answer_fails_its_group_alone(
    make_services: Callable[..., Services], sglang: Sglang, tmp_path: Path
) -> None:
    services = make_services(**words(tmp_path))
    before = failed("engine")

    def rule(request: ProxiedRequest) -> Fate | None:
        return Answer(500, "illegal memory access") if of_row(request, 2) else None

    async with proxied(sglang) as (proxy, engine), await services.start_buffer() as client:
        proxy.rules.append(rule)
        async with running(services, engine) as (_, returns, work):
            async with asyncio.timeout(PATIENCE):
                while (await client.stats()).depth < 3 or len(returns.groups) < 2:
                    await asyncio.sleep(0.1)
            assert returns.failures == {
                2: "EngineError: engine answered 500: illegal memory access"
            }
            assert not work.done()
    assert failed("engine") - before >= 2


async def test_an_engine_that_answers_errors_alone_is_the_one_to_blame(
    make_services: Callable[..., Services], sglang: Sglang
) -> None:
    services = make_services(rollout__concurrency=32, rollout__batchSize=16)
    async with proxied(sglang) as (proxy, engine), await services.start_buffer() as client:
        proxy.rules.append(
            lambda request: Answer(500, "no kernel") if request.path == "/generate" else None
        )
        async with running(services, engine) as (_, returns, work):
            with pytest.raises(WorkerError, match=r"8 groups.*engine answered 500: no kernel"):
                await asyncio.wait_for(work, 60)
        assert (await client.stats()).leases == 0
        assert len([group for group in returns.groups if group.failure]) == 7
        assert len(returns.groups) == 16


async def test_a_filter_that_raises_fails_its_group_alone(
    make_services: Callable[..., Services], engine: Client, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text("def odd(group):\n    return 1 / group.group_id > 0\n")
    services = make_services(rollout__dynamicFilter=f"{tmp_path}/odd.py:odd")
    before = failed("filter")
    async with await services.start_buffer() as client:
        async with running(services, engine) as (_, returns, work):
            async with asyncio.timeout(PATIENCE):
                while (await client.stats()).depth < 3 or not returns.groups:
                    await asyncio.sleep(0.05)
            failures = returns.failures
            assert not work.done()
        assert set(failures) == {0}
        line = (
            f"rollout.dynamicFilter {tmp_path}/odd.py:odd raised ZeroDivisionError: division by "
            "zero (odd.py:2)"
        )
        assert failures[0] == line
        assert failed("filter") - before >= 1
        assert (await client.stats()).counters["leases_expired"] == 0


PLAY = """
import asyncio
async def play(episode):
    await episode.generate(max_tokens=2)
    if episode.prompt.group_id == 2:
        await asyncio.sleep(1000)
    await episode.generate(max_tokens=3000)
"""


async def test_when_an_engine_dies_only_those_that_it_was_working_for_are_blamed(
    make_services: Callable[..., Services], sglang: Sglang, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(PLAY)
    services = make_services(
        **LONG, rollout__function=f"{tmp_path}/slow.py:play", rollout__functionSeconds=2000
    )
    async with proxied(sglang) as (proxy, engine), await services.start_buffer() as client:
        async with running(services, engine) as (worker, returns, work):
            await leases(worker, 4)
            async with asyncio.timeout(PATIENCE):
                while [w.requests.at_engine for w in worker.leased_groups.values()] != [2, 2, 0, 2]:
                    await asyncio.sleep(0.02)
            await sglang.generated(6 * 10)
            await proxy.stop()
            with pytest.raises(WorkerError, match=f"engine {proxy.url}"):
                await asyncio.wait_for(work, 30)
        assert returns.failures[2] == ""
        assert all(proxy.url in returns.failures[group] for group in (0, 1, 3))
        stats = await client.stats()
        assert (stats.leases, stats.counters["groups_returned"]) == (0, 4)


def words(directory: Path) -> dict[str, Any]:
    """Four prompts, each of which begins with another word."""
    rows = [json.dumps({"prompt": f"w{row:04d} w0001", "label": "w0001"}) for row in range(4)]
    (directory / "words.jsonl").write_text("\n".join(rows))
    return {"data__prompts": [{"path": str(directory / "words.jsonl")}], "data__shuffle": False}


def of_row(request: ProxiedRequest, row: int) -> bool:
    return request.path == "/generate" and request.input_ids[:1] == [WORD + row]


async def test_a_request_that_takes_too_long_is_given_up_and_not_made_again(
    make_services: Callable[..., Services],
    sglang: Sglang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "SLOWEST_TOKENS_A_SECOND", 1e6)
    services = make_services(**words(tmp_path))
    before = failed("timeout")
    async with Proxy(sglang.url) as proxy, Client(proxy.url, request_seconds=5.0) as engine:
        await engine.wait_ready(10)
        proxy.rules.append(lambda request: Delay(1000) if of_row(request, 2) else None)
        async with (
            await services.start_buffer() as client,
            running(services, engine) as (_, returns, work),
        ):
            async with asyncio.timeout(PATIENCE):
                while (await client.stats()).depth < 3 or not returns.groups:
                    await asyncio.sleep(0.1)
            failures = returns.failures
            assert not work.done()
        text = "no answer after 5 s to a request for up to 12 tokens"
        assert failures == {2: f"RequestTimeoutError: engine {proxy.url}: {text}"}
        assert failed("timeout") - before == len(
            [group for group in returns.groups if group.failure]
        )
        assert proxy.count("/abort_request") >= 1


async def test_a_group_that_cannot_be_read_fails_alone(
    make_services: Callable[..., Services], engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LeasedGroup.decode

    def broken(self: LeasedGroup) -> Any:
        if self.prompt.group_id == 3:
            self.message.prompt.prompt_json = "{"
        return decode(self)

    monkeypatch.setattr(LeasedGroup, "decode", broken)
    services = make_services()
    async with (
        await services.start_buffer() as client,
        running(services, engine) as (_, returns, work),
    ):
        async with asyncio.timeout(PATIENCE):
            while (await client.stats()).depth < 3 or not returns.groups:
                await asyncio.sleep(0.05)
        assert returns.failures[3].startswith("JSONDecodeError: Expecting property name")
        assert not work.done()


JUDGE = """
import time
def raises(sample):
    return {"right": 1.0}[sample.response]

def hangs(sample):
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        pytest.param("raises", "raised KeyError: ", id="raises"),
        pytest.param("hangs", ": no reward after 2 s (reward.timeoutSeconds)", id="hangs"),
    ],
)
async def test_a_reward_that_fails_says_why_on_the_first_line(
    make_services: Callable[..., Services], engine: Client, tmp_path: Path, name: str, line: str
) -> None:
    (tmp_path / "mine.py").write_text(JUDGE)
    services = make_services(reward={"function": f"{tmp_path}/mine.py:{name}", "timeoutSeconds": 2})
    async with await services.start_buffer(), running(services, engine) as (worker, _, work):
        groups = submitted(worker)
        async with asyncio.timeout(PATIENCE):
            while not groups:
                await asyncio.sleep(0.05)
        assert not work.done()
    [error] = {sample.error.partition("\n")[0].partition("'")[0] for sample in groups[0].samples}
    assert error.startswith(f"reward: {tmp_path}/mine.py:{name}")
    assert line in error
    for sample in groups[0].samples:
        assert sample.status is SampleStatus.FAILED
        assert name == "hangs" or sample.error.partition("\n")[0].endswith("(mine.py:4)")
        assert sample.error.partition("\n")[2] == f"prompts row {groups[0].prompt.row}"
