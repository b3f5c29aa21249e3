"""Trainer and engine on one machine.

Weights in shared memory, and an engine that rests meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.protocol import RESTING, WAKING, Client, Generation
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.weights.ipc import Ipc, colocated_with
from sluice_trainer.weights.sender import WeightSender
from tests.integration.conftest import Server
from tests.integration.engines import Sglang, call, gpus
from tests.integration.rendezvous_server import Rendezvous
from tests.integration.weights.conftest import FakeEngine
from tests.integration.weights.tools import PROMPT, begin, publish, send, serves

pytestmark = pytest.mark.skipif(
    gpus() > 0, reason="its memory is another GPU's; tests/gpu has the same on one"
)
MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]


@pytest.fixture(params=["sglang", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest) -> Server:
    """Each engine that can share the trainer's GPUs."""
    served: Server = request.getfixturevalue(f"_{request.param}")
    served.reset()
    return served


@pytest.fixture
def make_colocated_sender(make_sender: MakeSender) -> Callable[..., WeightSender]:
    def make(attempt: int = 1) -> WeightSender:
        return make_sender(
            Ipc(),
            attempt=attempt,
            colocated=True,
            transport="ipc",
            pauseMode="abort",
            timeoutSeconds=20,
        )

    return make


def name_of_weights(engine: Server) -> str:
    path = "/model_info" if isinstance(engine, Sglang) else "/weight_info"
    return str(call(engine.url + path)[1]["weight_version"])


async def rest(sender: WeightSender, rendezvous: Rendezvous) -> None:
    ledger = await rendezvous.ledger()
    await sender.rest(
        0, [pb.EngineMember(member=e.member, generation=e.generation) for e in ledger.values()]
    )


async def generate(engine: Client, tokens: int) -> Generation:
    return await engine.generate("a", PROMPT, {"max_new_tokens": tokens, "ignore_eos": True})


async def test_weights_arrive_through_memory_that_both_open(
    server: Server,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_colocated_sender: MakeSender,
    model: Path,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", server.address)
    sender = make_colocated_sender()
    for version, weights in ((1, other_model), (2, model), (3, other_model)):
        update = await publish(sender, version, weights)
        assert (list(update.engines), update.failed) == (["rollout-0"], {})
        assert await serves(server.url, weights, version, server.engine)


async def test_an_engine_at_rest_has_ended_its_work_holds_new_requests_and_wakes_with_new_weights(
    server: Server,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_colocated_sender: MakeSender,
    model: Path,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", server.address)
    sender = make_colocated_sender()
    await publish(sender, 1, model)
    async with server.engine.client(server.url) as engine:
        await engine.wait_ready(30.0)
        running = asyncio.create_task(generate(engine, 3000))
        await server.generated(20)
        assert not await engine.rests()
        await rest(sender, rendezvous)
        assert (await running).finish == "abort"
        assert name_of_weights(server) == RESTING
        assert await engine.rests()
        waiting = asyncio.create_task(generate(engine, 5))
        await rest(sender, rendezvous)  # has no effect
        await asyncio.sleep(0.5)
        assert not waiting.done()
        assert (await engine.health(5.0))[0]
        update = await publish(sender, 2, other_model)
        assert update.failed == {}
        assert [span.version for span in (await waiting).spans] == [2]
    assert await serves(server.url, other_model, 2, server.engine)


async def test_a_new_trainer_finds_engines_at_rest_or_half_awake_and_brings_them_up(
    server: Server,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_colocated_sender: MakeSender,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", server.address)
    await rest(make_colocated_sender(attempt=1), rendezvous)
    # The second trainer dies in its update.
    assert await begin(make_colocated_sender(attempt=2), 1, joiners_only=False) == 1
    assert name_of_weights(server) == WAKING
    third = make_colocated_sender(attempt=3)
    await rest(third, rendezvous)
    assert name_of_weights(server) == RESTING
    update = await publish(third, 1, other_model)
    assert (list(update.engines), update.failed) == (["rollout-0"], {})
    assert await serves(server.url, other_model, 1, server.engine)


async def test_an_engine_that_dies_at_rest_does_not_affect_the_other(
    sglang: Sglang,
    fake_engine: FakeEngine,
    rendezvous: Rendezvous,
    join_engine: JoinEngine,
    make_colocated_sender: MakeSender,
    other_model: Path,
) -> None:
    await join_engine("rollout-0", sglang.address)
    await join_engine("rollout-1", fake_engine.address)
    fake_engine.kill()
    sender = make_colocated_sender()
    await rest(sender, rendezvous)
    ledger = await rendezvous.ledger()
    assert "/model_info" in ledger["rollout-1"].last_error
    assert ledger["rollout-0"].last_error == ""
    assert await begin(sender, 1, joiners_only=False) == 1
    update = await send(sender, other_model)
    assert list(update.engines) == ["rollout-0"]
    assert await serves(sglang.url, other_model, 1)


def test_a_rank_sends_to_the_engine_on_its_own_gpu_whoever_is_missing() -> None:
    engines = [pb.EngineMember(member=pb.Member(name=f"rollout-{i}")) for i in (0, 2, 3, 10)]
    assert [[e.member.name for e in colocated_with(engines, rank, 1)] for rank in (0, 1, 10)] == [
        ["rollout-0"], [], ["rollout-10"],
    ]  # fmt: skip
    assert [[e.member.name for e in colocated_with(engines, rank, 2)] for rank in (4, 5, 6)] == [
        ["rollout-2"],
        [],
        ["rollout-3"],
    ]
