"""Helpers that run a whole update and compare what an engine serves afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sluice.engines.protocol import Engine
from sluice.engines.sglang import Sglang
from sluice.engines.sglang.layout import Layout
from sluice.wire.membership import Membership
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import Sglang as SglangServer
from tests.integration.engines import device, distance, log_probs, tensors, tolerance

BUCKET = 200_000
PROMPT = [20, 21, 22]
SGLANG = Sglang()
Tensors = list[tuple[str, Tensor]]


@dataclass
class Joined:
    name: str
    membership: Membership


async def begin(sender: WeightSender, version: int, *, joiners_only: bool) -> int:
    """Prepare and pause all engines that take part, and return their number."""
    plan = await sender.plan(version, joiners_only=joiners_only)
    await sender.prepare(version, plan.engines)
    await sender.pause()
    assert sender.current
    return len(sender.current.peers)


async def publish(
    sender: WeightSender, version: int, weights: Path | Tensors, *, joiners_only: bool = False
) -> UpdateOutcome:
    """Begin and send an update, as the training loop does after a step."""
    await begin(sender, version, joiners_only=joiners_only)
    return await send(sender, weights)


def set_deadline(sender: WeightSender, seconds: float) -> None:
    """Set the deadline of each phase in the sender's next updates."""
    sender._sync = sender._sync.model_copy(update={"timeout_seconds": seconds})


def on_device(weights: Path) -> Tensors:
    """Return the checkpoint's tensors on the trainer's device."""
    return [(name, tensor.to(device())) for name, tensor in tensors(weights)]


async def send(sender: WeightSender, weights: Path | Tensors) -> UpdateOutcome:
    sent = 0
    tensors = on_device(weights) if isinstance(weights, Path) else weights
    for bucket in buckets(tensors, BUCKET, Layout()):
        await sender.send(bucket)
        sent += 1
    assert sent > 2
    return await sender.finish()


async def serves(url: str, weights: Path, version: int, kind: Engine = SGLANG) -> bool:
    """Return True if the engine reports this version and computes with these weights."""
    async with kind.client(url) as engine:
        await engine.wait_ready(30.0)
        generation = await engine.generate("x", PROMPT, {"max_new_tokens": 12, "ignore_eos": True})
    assert (generation.finish, len(generation.tokens)) == ("length", 12), generation
    assert [span.version for span in generation.spans] == [version], generation
    return (
        distance(generation.log_probs, log_probs(weights, PROMPT + generation.tokens, 12))
        < tolerance()
    )


@contextmanager
def serving(model: Path, log: Path, *arguments: str, **variables: str) -> Iterator[SglangServer]:
    """Start an SGLang server, and kill it at the end."""
    server = SglangServer(model, log, *arguments, **variables)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()
        print(log.read_text()[-3000:])  # pytest shows it if the test has failed
