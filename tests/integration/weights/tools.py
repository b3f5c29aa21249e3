"""A whole update, and what an engine then answers."""

from __future__ import annotations

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
from tests.integration.engines import device, distance, log_probs, tensors, tolerance

BUCKET = 200_000
PROMPT = [20, 21, 22]
SGLANG = Sglang()
Tensors = list[tuple[str, Tensor]]


@dataclass
class Joined:
    name: str
    membership: Membership


async def begin(source: WeightSender, version: int, *, joiners_only: bool) -> int:
    """Prepare and pause all engines that take part; how many they are."""
    plan = await source.plan(version, joiners_only=joiners_only)
    await source.prepare(version, plan.engines)
    await source.pause()
    assert source.current
    return len(source.current.peers)


async def publish(
    source: WeightSender, version: int, weights: Path | Tensors, *, joiners_only: bool = False
) -> UpdateOutcome:
    """Begin and send an update, as the training loop does after a step."""
    await begin(source, version, joiners_only=joiners_only)
    return await send(source, weights)


def set_deadline(source: WeightSender, seconds: float) -> None:
    """Of its next updates."""
    source._sync = source._sync.model_copy(update={"timeout_seconds": seconds})


def on_device(weights: Path) -> Tensors:
    """The checkpoint's tensors, where a trainer holds them."""
    return [(name, tensor.to(device())) for name, tensor in tensors(weights)]


async def send(source: WeightSender, weights: Path | Tensors) -> UpdateOutcome:
    sent = 0
    tensors = on_device(weights) if isinstance(weights, Path) else weights
    for bucket in buckets(tensors, BUCKET, Layout()):
        await source.send(bucket)
        sent += 1
    assert sent > 2
    return await source.finish()


async def serves(url: str, weights: Path, version: int, kind: Engine = SGLANG) -> bool:
    """True where the engine computes with these weights, to rounding, and says that they have this
    version."""
    async with kind.client(url) as engine:
        await engine.wait_ready(30.0)
        generation = await engine.generate("x", PROMPT, {"max_new_tokens": 12, "ignore_eos": True})
    assert (generation.finish, len(generation.tokens)) == ("length", 12), generation
    assert [span.version for span in generation.spans] == [version], generation
    return (
        distance(generation.log_probs, log_probs(weights, PROMPT + generation.tokens, 12))
        < tolerance()
    )
