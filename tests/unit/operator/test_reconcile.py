"""The order in which a plan is applied, and what a crash in between leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sluice.api import RLJob, RLJobStatus, manifest
from sluice_operator.plan import Deletion, Event, KubeObject, Observed, Progress
from sluice_operator.reconcile import reconcile
from tests.unit.operator.world import World, make_job


class Recorder:
    """A cluster that notes what it is asked, in order, and does it to a world."""

    def __init__(self, world: World) -> None:
        self.world, self.calls, self.broken = world, list[str](), ""

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.broken:
            raise ConnectionError(call)

    async def observe(self, job: RLJob) -> Observed:
        return self.world.observed()

    async def write_status(self, job: RLJob, status: RLJobStatus) -> None:
        self.note("status")
        self.world.stored = manifest(status)

    async def apply(self, job: RLJob, objects: Sequence[KubeObject]) -> None:
        self.note("apply")
        for body in objects:
            self.world._create(body)

    async def delete(self, job: RLJob, deletions: Sequence[Deletion]) -> None:
        self.note("delete")
        for deletion in deletions:
            self.world._delete(deletion.name, deletion.grace)

    async def emit(self, job: RLJob, events: Sequence[Event]) -> None:
        self.note("emit")


@pytest.fixture
def recorder() -> Recorder:
    world = World(make_job(rollout={"replicas": 1}))
    world.settle()
    return Recorder(world)


async def run(recorder: Recorder, **options: Any) -> None:
    await reconcile(recorder, recorder.world.job, recorder.world.now, **options)


async def test_an_equal_status_is_not_written(recorder: Recorder) -> None:
    await run(recorder)
    assert recorder.calls == []


async def test_status_then_deletions_then_creations_then_events(recorder: Recorder) -> None:
    recorder.world.job = make_job(rollout={"replicas": 2})
    recorder.world.end("demo-trainer-0-1-0", 1)
    await run(recorder)
    assert recorder.calls == ["status", "delete", "apply", "emit"]


@pytest.mark.parametrize("broken", ["status", "delete", "apply"])
async def test_a_crash_in_between_is_made_good_by_the_next_pass(
    recorder: Recorder, broken: str
) -> None:
    world = recorder.world
    world.job = make_job(rollout={"replicas": 2})
    world.end("demo-trainer-0-1-0", 1)
    recorder.broken = broken
    with pytest.raises(ConnectionError):
        await run(recorder)
    assert recorder.calls[-1] == broken
    recorder.broken = ""
    await run(recorder)
    world.settle()
    world.advance(5)
    world.settle()
    assert world.names("trainer") == ["demo-trainer-0-2-0"]
    assert world.names("rollout") == ["demo-rollout-0-1-0", "demo-rollout-1-1-0"]
    assert world.status.restarts == 1


async def test_progress_comes_from_the_caller(recorder: Recorder) -> None:
    await run(recorder, progress=Progress(7))
    assert recorder.world.status.step == 7
