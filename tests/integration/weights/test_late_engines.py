"""An engine that is frozen, dead or cut off in an update does not delay the others.

Engines are processes without a model; sender, control protocol, communicators and rendezvous are
real.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sluice.engines.sglang.layout import Layout
from sluice_trainer.weights.buckets import Bucket, buckets
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import call, device
from tests.integration.rendezvous_server import Rendezvous
from tests.integration.weights.conftest import PATIENCE, FakeEngine
from tests.integration.weights.tools import begin

MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]
LATE = 2.0
# Seconds, far below `PATIENCE`, which is the deadline of a phase here.
SOON = 10 * LATE
SIZE = 300_000


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    started = [FakeEngine() for _ in range(3)]
    yield started
    for engine in started:
        engine.signal(signal.SIGCONT)
        engine.kill()


def fresh_buckets() -> list[Bucket]:
    tensors = [(f"w{n}", torch.ones(SIZE, dtype=torch.uint8, device=device())) for n in range(5)]
    return list(buckets(tensors, SIZE, Layout()))


async def publish(
    sender: WeightSender, version: int, *, joiners_only: bool = False
) -> UpdateOutcome:
    await begin(sender, version, joiners_only=joiners_only)
    for bucket in fresh_buckets():
        await sender.send(bucket)
    return await sender.finish()


async def publish_until(
    sender: WeightSender, version: int, phase: str, lose: Callable[[], None]
) -> UpdateOutcome:
    """Publish a version, and lose an engine as a phase begins, or half way in the transfer."""
    plan = await sender.plan(version, joiners_only=False)
    steps = [
        ("prepare", lambda: sender.prepare(version, plan.engines)),
        ("pause", sender.pause),
        *(("transfer", lambda bucket=bucket: sender.send(bucket)) for bucket in fresh_buckets()),
    ]
    sent = 0
    for name, step in steps:
        if name == phase and sent == (2 if phase == "transfer" else 0):
            lose()
        sent += name == "transfer"
        await step()
    if phase == "verify":
        lose()
    return await sender.finish()


def pause(engine: FakeEngine) -> float:
    """Return the seconds of an engine's last pause."""
    _, received = call(engine.url + "/received")
    return float(received["pauses"][-1])


@pytest.mark.parametrize("phase", ["prepare", "pause", "transfer", "verify"])
async def test_an_engine_that_freezes_in_a_phase_is_left_and_the_others_go_on(
    engines: list[FakeEngine],
    join_engine: JoinEngine,
    make_sender: MakeSender,
    rendezvous: Rendezvous,
    phase: str,
) -> None:
    names = [f"rollout-{n}" for n in range(3)]
    for name, engine in zip(names, engines, strict=True):
        await join_engine(name, engine.address)
    sender = make_sender(timeoutSeconds=PATIENCE, lateSeconds=LATE)
    assert (await publish(sender, 1)).failed == {}
    update = await publish_until(sender, 2, phase, lambda: engines[1].signal(signal.SIGSTOP))
    assert (sorted(update.engines), [*update.failed]) == (["rollout-0", "rollout-2"], [names[1]])
    assert update.failed[names[1]].startswith(f"{phase}: only this engine was late")
    assert max(pause(engines[0]), pause(engines[2])) < SOON
    if phase in ("prepare", "verify"):
        assert max(pause(engines[0]), pause(engines[2])) < LATE, "an engine was paused for it"
    assert not (await rendezvous.ledger())[names[1]].admitted
    engines[1].signal(signal.SIGCONT)
    update = await publish(sender, 2, joiners_only=True)
    assert (list(update.engines), update.failed) == ([names[1]], {})


PHASES = ("prepare", "pause", "transfer", "verify")


@pytest.mark.parametrize(
    ("lora", "phase"),
    [
        *(("merged", phase) for phase in PHASES),
        ("adapter", "transfer"),
        *(
            pytest.param("adapter", phase, marks=pytest.mark.long)
            for phase in PHASES
            if phase != "transfer"
        ),
    ],
)
async def test_an_engine_that_is_killed_in_a_phase_joins_again_with_the_weights_of_the_others(
    engines: list[FakeEngine],
    join_engine: JoinEngine,
    make_sender: MakeSender,
    phase: str,
    lora: str,
) -> None:
    await join_engine("rollout-0", engines[0].address)
    killed = await join_engine("rollout-1", engines[1].address)
    sender = make_sender(timeoutSeconds=PATIENCE, lateSeconds=LATE, lora=lora)
    assert (await publish(sender, 1)).failed == {}
    update = await publish_until(sender, 2, phase, engines[1].kill)
    assert (update.engines, [*update.failed]) == (("rollout-0",), ["rollout-1"])
    assert update.failed["rollout-1"].startswith(f"{phase}: ")
    assert pause(engines[0]) < SOON
    # Its worker starts it again; here a third engine takes its place.
    await killed.membership.__aexit__()
    await join_engine("rollout-1", engines[2].address)
    update = await publish(sender, 2, joiners_only=True)
    assert (update.engines, update.failed) == (("rollout-1",), {})
    kept, new = (call(engine.url + "/received")[1] for engine in (engines[0], engines[2]))
    assert (kept["weight_version"], new["weight_version"]) == ("2", "2")
    assert kept["sum"] == 2 * new["sum"] > 0, "two versions, and one"


async def test_an_engine_whose_member_has_left_is_not_waited_for(
    fake_engine: FakeEngine, join_engine: JoinEngine, make_sender: MakeSender
) -> None:
    """It cannot be late, because there is no other engine to compare with."""
    member = await join_engine("rollout-0", fake_engine.address)
    sender = make_sender(timeoutSeconds=PATIENCE, lateSeconds=LATE)
    assert await begin(sender, 1, joiners_only=False) == 1
    fake_engine.signal(signal.SIGSTOP)
    started = time.monotonic()
    sending = asyncio.create_task(sender.send(fresh_buckets()[0]))
    await asyncio.sleep(2 * LATE)
    assert not sending.done()
    await member.membership.__aexit__()
    await sending
    update = await sender.finish()
    assert time.monotonic() - started < SOON
    assert update.failed == {"rollout-0": "transfer: it has left the rendezvous"}
