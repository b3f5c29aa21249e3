"""A trainer publishes weights, and a worker brings them to a real engine that it cannot reach."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.api import WeightSync
from sluice.engines.sglang import Sglang as SglangEngine
from sluice.engines.sglang.layout import Layout
from sluice.weight_store.local_copy import LocalCopy
from sluice.weight_store.manifest import VersionId
from sluice.weight_store.objects import DirectoryStore
from sluice.weight_store.publisher import BASE, Publisher
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_rollout.stored_weights import StoredWeights
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.disk import Disk, VersionDirectories
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.stored_updates import STORE, StoredUpdates
from tests.integration.engines import Sglang, tensors
from tests.integration.rendezvous_server import Rendezvous, engine_member, eventually
from tests.integration.weights.tools import BUCKET, serves

Follow = Callable[[], Awaitable[StoredWeights]]


@dataclass
class Trainer:
    """A trainer's rank 0, without a model."""

    updates: StoredUpdates
    store: Path
    attempt: int

    async def publish(self, version: int, weights: Path) -> UpdateOutcome:
        for bucket in buckets(tensors(weights), BUCKET, Layout()):
            await self.updates.write(bucket, version)
        return await self.updates.publish(version, "")

    def path(self, version: int) -> Path:
        return self.store / VersionId(version, self.attempt).directory


def make_trainer(
    rendezvous: Rendezvous, root: Path, model: Path, attempt: int = 1, timeout: float = 10.0
) -> Trainer:
    store, own = root / "store", root / f"trainer{attempt}"
    versions = VersionDirectories(own, attempt)
    publisher = Publisher(DirectoryStore(store), attempt, own / BASE, snapshot_every=3, keep=1)
    files = Disk(versions, model, drawn=False)
    caller = ("trainer-0", attempt)
    updates = StoredUpdates(rendezvous.stub, caller, versions, files, publisher, timeout)
    return Trainer(updates, store, attempt)


@pytest.fixture
async def follow(rendezvous: Rendezvous, sglang: Sglang, tmp_path: Path) -> AsyncIterator[Follow]:
    """Start the part of a worker that brings weights from the store to the engine."""
    numbers = itertools.count()
    async with AsyncExitStack() as stack:
        http = SglangEngine().session()
        stack.push_async_callback(http.close)

        async def start() -> StoredWeights:
            number = next(numbers)
            directory = tmp_path / f"copy{number}"
            directory.mkdir()
            control = SglangEngine().control(sglang.address, http, 60.0, f"rollout-{number}/1")
            copy = LocalCopy(DirectoryStore(tmp_path / "store"), directory)

            def heartbeat() -> pb.Heartbeat:
                beat = pb.Heartbeat()
                stored.report(beat)
                return beat

            member = engine_member(f"rollout-{number}", sglang.address)
            membership = Membership(rendezvous.address, lambda: member, heartbeat)
            stored = StoredWeights(WeightSync(), control, copy, membership)
            await stack.enter_async_context(membership)
            following = asyncio.create_task(stored.run())
            stack.callback(following.cancel)
            return stored

        yield start


async def arrives(stored: StoredWeights, version: int) -> None:
    """Wait until the rendezvous says that the engine serves the version."""
    membership = stored.membership
    await eventually(membership, lambda: membership.version == version)
    assert membership.latest
    assert membership.latest.admitted


def changed(model: Path, directory: Path, seed: int) -> Path:
    """Write the model with some other values, as a step of training does."""
    torch.manual_seed(seed)
    directory.mkdir()

    def step(tensor: Tensor) -> Tensor:
        return torch.where(torch.rand(tensor.shape) < 0.1, tensor * 1.5, tensor)

    for file in model.iterdir():
        if file.suffix == ".safetensors":
            weights = {name: step(tensor) for name, tensor in load_file(file).items()}
            save_file(weights, directory / file.name, {"format": "pt"})
        else:
            (directory / file.name).write_bytes(file.read_bytes())
    return directory


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.fixture
def models(model: Path, tmp_path: Path) -> list[Path]:
    return [model, *(changed(model, tmp_path / f"model{seed}", seed) for seed in (1, 2, 3, 4))]


async def test_an_engine_follows_through_deltas_damage_and_a_new_trainer(
    rendezvous: Rendezvous,
    follow: Follow,
    sglang: Sglang,
    models: list[Path],
    tmp_path: Path,
) -> None:
    trainer = make_trainer(rendezvous, tmp_path, models[0])
    stored = await follow()
    outcome = await trainer.publish(0, models[1])
    assert (outcome.failed, outcome.delta_bytes, outcome.engines) == ({}, 0, ())
    await arrives(stored, 0)
    assert await serves(sglang.url, models[1], 0)

    outcome = await trainer.publish(1, models[2])
    assert 0 < outcome.delta_bytes < outcome.full_bytes / 2
    await arrives(stored, 1)
    assert await serves(sglang.url, models[2], 1)

    # Version 2 reaches the store and is damaged there: the engine works on with version 1, and
    # the trainer, told by the rendezvous, sends version 3 whole.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.updates, "_announce", never)
        await trainer.publish(2, models[3])
    flip(next(trainer.path(2).glob("*.safetensors.delta")))
    await trainer.updates._announce(2)
    async with asyncio.timeout(60):
        while not stored.copy.damaged:
            await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        while "weights_damaged" not in (await rendezvous.ledger())["rollout-0"].gauges:
            await asyncio.sleep(0.05)
    assert stored.membership.version == 1
    outcome = await trainer.publish(3, models[4])
    await arrives(stored, 3)
    assert await serves(sglang.url, models[4], 3)

    # A trainer that continues from a checkpoint writes version 1 again, with other weights.
    successor = make_trainer(rendezvous, tmp_path, models[0], attempt=2)
    await successor.publish(1, models[3])
    await arrives(stored, 1)
    assert stored.loaded == (1, 2)
    assert await serves(sglang.url, models[3], 1)
    with pytest.raises(Exception, match="attempt 1 was replaced by attempt 2"):
        await trainer.publish(4, models[1])
    # A new engine takes the snapshot.
    joiner = await follow()
    await arrives(joiner, 1)
    assert joiner.loaded == (1, 2)


async def never(version: int) -> None:
    """Take the place of the announcement."""


async def test_a_store_that_refuses_fails_the_update_and_takes_it_later(
    rendezvous: Rendezvous, models: list[Path], tmp_path: Path
) -> None:
    trainer = make_trainer(rendezvous, tmp_path, models[0], timeout=0.0)
    await trainer.publish(0, models[1])
    assert await trainer.updates.announced(0)
    away = trainer.store.rename(tmp_path / "away")
    trainer.store.write_text("a file in the place of the directory")
    outcome = await trainer.publish(1, models[2])
    assert outcome.failed.keys() == {STORE}
    assert not await trainer.updates.announced(1)
    assert rendezvous.service.registry.version == 0
    trainer.store.unlink()
    away.rename(trainer.store)
    assert (await trainer.publish(1, models[2])).failed == {}
    assert await trainer.updates.announced(1)
