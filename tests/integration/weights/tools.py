"""A whole update, and what an engine then answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sluice.wire.membership import Membership
from sluice_rollout.engine import Engine
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.publisher import Publisher, Update
from tests.integration.engines import distance, log_probs, tensors

BUCKET = 200_000
PROMPT = [20, 21, 22]


@dataclass
class Joined:
    name: str
    membership: Membership


async def publish(publisher: Publisher, version: int, weights: Path, *, joiners_only: bool = False) -> Update:
    """What the training loop does after a step."""
    await publisher.begin(version, joiners_only=joiners_only)
    return await send(publisher, weights)


async def send(publisher: Publisher, weights: Path) -> Update:
    sent = 0
    for bucket in buckets(tensors(weights), BUCKET):
        await publisher.send(bucket)
        sent += 1
    assert sent > 2
    return await publisher.finish()


async def serves(url: str, weights: Path, version: int) -> bool:
    """True where the engine computes with these weights, to rounding, and says that they have this version."""
    async with Engine(url) as engine:
        made = await engine.generate("x", PROMPT, {"max_new_tokens": 12, "ignore_eos": True})
    assert [span.version for span in made.spans] == [version]
    return distance(made.log_probs, log_probs(weights, PROMPT + made.tokens, 12)) < 1e-4
