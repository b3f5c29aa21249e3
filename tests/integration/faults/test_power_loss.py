"""The buffer's storage loses its power under load.

All acknowledged changes are there, and the database opens.

The processes are real and write to a real disk; preload/power.c keeps a journal of their writes,
and disk.py models what a disk may hold after a power loss: all that was synced, and any part of the
rest.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import pytest

from sluice.api import RLJob
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_buffer.core import Buffer, open_buffer
from sluice_buffer.serving.metrics import counters as counters_of
from tests.integration.buffer.test_buffer_crash import ANSWERED, BATCH, KILLS, SAMPLES, Load, run
from tests.integration.faults.disk import Disk, entries
from tests.integration.faults.native import library, recorded
from tests.unit.buffer.buffer_tools import BufferProcess, make_job, shard_group

# Moments at which one journal is cut.
CUTS = 60


def seed() -> int:
    """SLUICE_CRASH_SEED repeats a test; it is printed if a test fails."""
    chosen = int(os.environ.get("SLUICE_CRASH_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"SLUICE_CRASH_SEED={chosen}")
    return chosen


def loaded_job(directory: Path) -> RLJob:
    return make_job(
        directory,
        rows=400,
        rollout__batchSize=BATCH,
        rollout__samplesPerPrompt=SAMPLES,
        rollout__mode="async",
        rollout__maxStaleness=2,
        rollout__partial={"enabled": True},
        trainer__steps=100_000,
        buffer__leaseSeconds=1.0,
    )


@dataclass
class Powered:
    """A buffer whose storage can lose its power."""

    directory: Path
    draw: random.Random
    server: BufferProcess = field(init=False)

    def __post_init__(self) -> None:
        self.storage, self.journal = self.directory / "storage", self.directory / "journal"
        self.storage.mkdir()
        self.server = BufferProcess(
            loaded_job(self.directory), self.directory, LD_PRELOAD=str(library("power")),
            POWER_DIRECTORY=str(self.storage), POWER_JOURNAL=str(self.journal),
        )  # fmt: skip
        self.disk = Disk(self.storage)

    def fail(self) -> None:
        """Power goes at once; the storage is then what the disk holds when it comes back."""
        self.server.end(signal.SIGKILL)
        for entry in entries(self.journal):
            self.disk.feed(entry)
        shutil.rmtree(self.storage)
        self.storage.mkdir()
        self.disk.restore(self.storage, self.draw)
        self.disk = Disk(self.storage)
        self.journal.unlink(missing_ok=True)


@dataclass
class Blackouts(Load):
    """The load of the crash tests; but it is the power that goes."""

    powered: Powered | None = None

    async def kill(self) -> None:
        assert self.powered
        while not self.done and self.kills < KILLS:
            await asyncio.sleep(self.random.uniform(0.05, 0.8))
            await asyncio.to_thread(self.powered.fail)
            self.kills += 1
            await asyncio.to_thread(self.server.start)


@pytest.fixture
def powered(tmp_path: Path) -> Any:
    machine = Powered(tmp_path, random.Random(seed()))
    yield machine
    if machine.server.process and machine.server.process.poll() is None:
        machine.server.end(signal.SIGKILL)


async def test_a_buffer_goes_on_after_each_loss_of_power(powered: Powered) -> None:
    powered.server.start()
    load = Blackouts(powered.server, powered.draw, time.monotonic() + 200, powered=powered)
    await run(load)
    assert load.kills == KILLS
    await load.check()


@dataclass
class Acknowledged:
    """An answer that a client got, and the end of the journal by then."""

    end: int
    what: str
    step: int = 0
    # submit: group -> tokens of its first sample.
    groups: dict[int, bytes] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)


@dataclass
class Written(Load):
    """The load, with every acknowledgement recorded. The buffer is not killed."""

    journal: Path = Path()
    acknowledged: list[Acknowledged] = field(default_factory=list)
    # The trainer's changes of the step, from the moment before each was asked for.
    begun: list[Acknowledged] = field(default_factory=list)

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = method.__name__
        if name in ("commit", "checkpoint", "rewind"):
            self.begun.append(Acknowledged(self.journal.stat().st_size, name, args[0]))
        answer = await super().call(method, *args, **kwargs)
        note = Acknowledged(self.journal.stat().st_size, name)
        if name in ("commit", "checkpoint", "rewind", "take"):
            note.step = args[0]
        if name == "take":
            note.batch = list(dict.fromkeys(s.group_id for s in answer.sequences))
        if name == "submit":
            stored = [args[0][key] for key, result in answer.items() if result.outcome in ANSWERED]
            note.groups = {g.prompt.group_id: g.samples[0].tokens for g in stored}
        if name != "take" or answer.state == pb.TakeBatchResponse.STATE_READY:
            self.acknowledged.append(note)
        return answer

    async def kill(self) -> None:
        """End the load after a while."""
        await asyncio.sleep(4.0)
        self.kills = KILLS


def step_after(notes: list[Acknowledged]) -> int:
    steps = [note.step for note in notes if note.what in ("commit", "rewind")]
    return steps[-1] if steps else 0


def check_opened(buffer: Buffer, load: Written, cut: int) -> None:
    """All that was acknowledged before the cut is in the buffer."""
    before = [note for note in load.acknowledged if note.end <= cut]
    begun = [note for note in load.begun if note.end <= cut]
    memory, counters = buffer.memory, counters_of(buffer)
    assert counters["groups_lost"] == counters["groups_trained_twice"] == memory.missing == 0
    assert memory.progress.step in {step_after(before), step_after(begun)}
    assert counters["groups_trained"] == memory.progress.step * BATCH
    safe = max((note.step for note in before if note.what == "checkpoint"), default=0)
    assert memory.progress.checkpoint_step >= safe
    forgotten = memory.progress.checkpoint_step
    batches = {note.step: note.batch for note in before if note.what == "take"}
    for step, batch in batches.items():
        assert step <= forgotten or memory.batches[step] == batch, (
            f"the batch of step {step} has changed"
        )
    gone = {group_id for note in load.acknowledged if note.what == "take" and note.step <= forgotten
            for group_id in note.batch}  # fmt: skip
    for note in before:
        for group_id, tokens in note.groups.items():
            if group_id not in gone:
                assert shard_group(buffer, group_id, [0]).samples[0].tokens == tokens


async def test_a_disk_that_is_cut_off_at_any_moment_has_what_was_acknowledged(
    powered: Powered, tmp_path: Path
) -> None:
    powered.server.start()
    load = Written(powered.server, powered.draw, time.monotonic() + 60, journal=powered.journal)
    await run(load)
    powered.server.end(signal.SIGKILL)
    journal = list(entries(powered.journal))
    served = next(note.end for note in load.acknowledged)
    early = powered.draw.choices(
        [entry.end for entry in journal if entry.end < served], k=CUTS // 6
    )
    cuts = sorted(
        early + powered.draw.choices([entry.end for entry in journal], k=CUTS - len(early))
    )
    position, acknowledged = 0, 0
    for number, cut in enumerate(cuts):
        while position < len(journal) and journal[position].end <= cut:
            powered.disk.feed(journal[position])
            position += 1
        target = tmp_path / f"cut-{number}"
        target.mkdir()
        powered.disk.restore(target, powered.draw)
        buffer = open_buffer(powered.server.job, target)
        try:
            check_opened(buffer, load, cut)
        finally:
            buffer.close()
        shutil.rmtree(target)
        acknowledged += cut > served
    assert acknowledged
    print(
        f"{CUTS} cuts in {len(journal)} operations, {len(load.stored)} groups, {load.committed} "
        "steps"
    )


SLOPPY = """
import sys, lmdb
env = lmdb.open(sys.argv[1] + "/data", subdir=False, map_size=1 << 24, sync=False)
for number in range(200):
    with env.begin(write=True) as transaction:
        transaction.put(b"%d" % number, b"x" * 5000)
"""


def test_a_database_that_does_not_sync_is_found_broken(tmp_path: Path) -> None:
    """The disk of these tests does forget: LMDB without its syncs does not survive it."""
    storage, journal = tmp_path / "storage", tmp_path / "journal"
    storage.mkdir()
    disk = Disk(storage)
    recorded(journal, storage, SLOPPY, str(storage))
    for entry in entries(journal):
        disk.feed(entry)
    draw, intact = random.Random(1), 0
    for number in range(20):
        target = tmp_path / str(number)
        target.mkdir()
        disk.restore(target, draw)
        try:
            with lmdb.open(str(target / "data"), subdir=False, create=False).begin() as transaction:
                intact += sum(1 for _ in transaction.cursor()) == 200
        except lmdb.Error:
            continue
    assert intact < 20
