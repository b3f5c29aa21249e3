"""`maxStaleness` holds for every sample, in whatever order groups finish, and never blocks."""

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.wire.v1 import buffer_pb2 as bpb
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import GroupState
from sluice_buffer.rules.admission import AdmissionPolicy
from sluice_buffer.rules.staleness import Stragglers, due, earliest, places_left, stragglers
from sluice_buffer.transitions.submits import SubmitAnswer, SubmitOutcome
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group, make_job, make_sample

MakeBuffer = Callable[..., LocalBuffer]
POLICY = AdmissionPolicy(
    batch_size=2,
    samples_per_prompt=1,
    max_staleness=2,
    over_sampling=1.0,
    partial=False,
    sync=False,
    total_steps=100,
    stream_end=None,
)


@pytest.mark.parametrize(
    ("step", "version", "outstanding", "expected"),
    [
        pytest.param(1, 0, {}, 6, id="three batches at the start"),
        pytest.param(1, 0, {0: 4}, 2, id="what is left of them"),
        pytest.param(2, 1, {0: 4, 1: 2}, 0, id="all of the next three batches are taken"),
        pytest.param(2, 1, {0: 4}, 2, id="a batch more with newer weights"),
        pytest.param(2, 0, {1: 6}, 0, id="older weights, and the later batches are full"),
        pytest.param(2, 0, {1: 4}, 2, id="older weights, and a later batch has room"),
        pytest.param(4, 0, {}, 0, id="due by a step that is fixed"),
        pytest.param(1, -1, {}, 0, id="no weights yet"),
    ],
)
def test_room(step: int, version: int, outstanding: dict[int, int], expected: int) -> None:
    assert places_left(POLICY, step=step, version=version, outstanding=outstanding) == expected


@pytest.mark.parametrize(
    ("step", "in_work", "finished", "expected"),
    [
        pytest.param(
            2, {0: 3}, {0: 1, 1: 1}, Stragglers(3, 1), id="one of three has to finish now"
        ),
        pytest.param(2, {0: 2}, {0: 1, 1: 1}, None, id="those in work fit into the batch after"),
        pytest.param(2, {0: 3}, {0: 2}, None, id="the batch takes none that is due later"),
        pytest.param(3, {0: 1}, {0: 1, 1: 4}, Stragglers(3, 1), id="due by this step"),
        pytest.param(3, {1: 3}, {0: 1, 1: 1}, None, id="a full batch of what is due by then"),
        pytest.param(3, {1: 3}, {0: 1, 2: 1}, Stragglers(4, 1), id="due by the step after"),
        pytest.param(9, {0: 1}, {8: 2}, Stragglers(9, 1), id="due long ago"),
    ],
)
def test_stragglers(
    step: int, in_work: dict[int, int], finished: dict[int, int], expected: Stragglers | None
) -> None:
    assert stragglers(POLICY, step=step, in_work=in_work, finished=finished) == expected


def test_a_batch_takes_what_is_due_first() -> None:
    finished = {3: [1, 9], 1: [8, 7], 2: [5, 0, 6]}
    assert earliest(finished, 4) == [0, 5, 7, 8]
    assert earliest(finished, 7) == [0, 1, 5, 6, 7, 8, 9]


def test_no_group_is_left_behind_by_younger_ones(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=2, rollout__batchSize=2)
    oldest = buffer.lease(count=6)
    for group in oldest[:2]:
        buffer.submit(group)
    buffer.step(1)
    younger = buffer.lease("rollout-1", count=2, version=1)
    buffer.submit(oldest[2])
    buffer.submit(younger[0], version=1)
    assert buffer.core.take(2, 1) == (
        "1 of 3 groups that would be too old after batch 3: 3, 4, 5, 3 leased by rollout-0"
    )
    assert buffer.core.batches.late(2)
    buffer.submit(oldest[3])
    assert buffer.step(2) == [2, 3]
    assert buffer.core.take(3, 1) == (
        "1 of 2 groups finished, 2 leased by rollout-0, 1 leased by rollout-1"
    )
    for group in oldest[4:]:
        buffer.submit(group)
    assert buffer.step(3) == [4, 5]
    buffer.submit(younger[1], version=1)
    assert buffer.step(4) == [6, 7]
    assert buffer.counters["stale_groups"] == 0


def test_a_group_that_came_back_is_not_begun_with_weights_that_are_too_old(
    make_buffer: MakeBuffer,
) -> None:
    """While a batch trains, one version fewer is young enough for the next one."""
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=1, rollout__batchSize=2)
    returned, *others = buffer.lease(count=4)
    for group in others:
        buffer.submit(group)
    buffer.step(1)
    buffer.fill(1, version=1)
    buffer.give_back(returned)
    assert buffer.core.take(2, 1) is None, "fixed, and not committed"
    buffer.sync()
    assert buffer.core.available(0) == 0
    assert buffer.lease("rollout-1", count=1, version=0) == []
    (again,) = buffer.lease("rollout-1", count=1, version=1)
    assert again.prompt.group_id == returned.prompt.group_id


def test_a_partial_response_goes_on_with_weights_as_new_and_before_others(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=2, rollout__batchSize=2)
    buffer.fill(2)
    buffer.step(1)
    without, begun = buffer.lease(count=2, version=1)
    buffer.give_back(without)
    buffer.give_back(
        begun,
        [make_sample(0, status=pb.SAMPLE_STATUS_ABORTED, reward=None, response=3, version=1)],
    )
    assert buffer.core.available(0) == 2
    new = buffer.lease("rollout-2", count=9, version=0)
    assert [g.prompt.group_id for g in new] == [4, 5], "its weights are older than the response's"
    again = buffer.lease("rollout-1", count=2, version=1)
    assert [g.prompt.group_id for g in again] == [begun.prompt.group_id, without.prompt.group_id]


def test_a_group_of_weights_that_an_engine_was_given_again_is_generated_anew(
    make_buffer: MakeBuffer,
) -> None:
    """After a rewind a running response goes on with weights older than its lease's."""
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=1, rollout__batchSize=1)
    for step in (1, 2, 3):
        buffer.fill(1, version=step - 1)
        buffer.step(step)
    (running,) = buffer.lease(count=1, version=3)
    buffer.core.rewind(1, 2)
    answer = buffer.submit(running, version=1)
    assert answer == SubmitAnswer(
        SubmitOutcome.STALE,
        "version 1 is older than rollout.maxStaleness allows; it is generated again",
    )
    assert buffer.lease(count=1, version=1) == [], "the batches that it could be in are fixed"
    for step in (2, 3):
        assert buffer.core.take(step, 2) is None
        buffer.core.commit(step, step, 2, {})
    (again,) = buffer.lease(count=1, version=3)
    buffer.submit(again, version=3)
    assert buffer.core.take(4, 2) is None
    assert buffer.counters["stale_groups"] == 0


# -- any schedule


@dataclass
class Engine:
    """A rollout worker and the weights that its engine serves."""

    name: str
    version: int = 0
    attempt: int = 1
    # Leases, and the version of the oldest token of each.
    held: list[tuple[bpb.LeasedGroup, int]] = field(default_factory=list)


class Run:
    """A job on a real buffer, whose events come in random order. Little is written to the disk."""

    def __init__(self, root: Path, draw: random.Random, staleness: int, size: int) -> None:
        self.draw, self.size = draw, size
        job = make_job(
            root,
            rollout__mode="async",
            rollout__maxStaleness=staleness,
            rollout__batchSize=size,
            rollout__dynamicFilter="my.module.keep",
            trainer__steps=3 * staleness + 4,
        )
        self.buffer = LocalBuffer(job, root / "storage")
        self.core = self.buffer.core
        self.engines = [Engine(f"rollout-{i}") for i in range(draw.randint(1, 4))]
        self.trainer = 1

    @property
    def step(self) -> int:
        return self.core.memory.progress.step

    def lease(self, engine: Engine, count: int) -> bool:
        call = self.buffer.call(engine.name, engine.attempt)
        self.core.leases.admit(call.worker)
        available = self.core.available(engine.version)
        keys = self.core.lease(call, count, engine.version)
        if not self.core.memory.suspects:  # of those a worker gets one at a time
            assert len(keys) == min(count, available)
        for key in keys:
            group = self.buffer.arrived(key)
            begun = [span.version for s in group.partial.samples for span in s.weight_versions]
            engine.held.append((group, min([engine.version, *begun])))
        return bool(keys)

    def finish(self, engine: Engine, *, drop: bool = False, fail: bool = False) -> None:
        group, version = engine.held.pop(self.draw.randrange(len(engine.held)))
        status = pb.SAMPLE_STATUS_FAILED if fail else pb.SAMPLE_STATUS_COMPLETED
        message = make_group(group.prompt, version=version, status=status)
        if drop:
            message.samples[0].metadata_json = '{"filtered": "too easy"}'
        self.core.submit(message.SerializeToString())

    def give_back(self, engine: Engine) -> None:
        group, version = engine.held.pop(self.draw.randrange(len(engine.held)))
        begun = make_sample(
            0, version=version, status=pb.SAMPLE_STATUS_ABORTED, reward=None,
            response=self.draw.randint(1, 9),
        )  # fmt: skip
        returned = pb.SampleGroup(
            prompt=group.prompt, samples=[begun] if self.draw.random() < 0.5 else []
        )
        self.core.give_back(returned.SerializeToString())
        self.buffer.sync()  # the next worker gets what is on the disk

    def give_weights(self, engine: Engine, version: int) -> None:
        """Running responses go on with them; those without a token yet begin with them."""
        engine.version = version
        engine.held = [
            (group, min(oldest, version) if self.draw.random() < 0.8 else version)
            for group, oldest in engine.held
        ]

    def replace(self, engine: Engine) -> None:
        """Another process joins, with any weights that there have been."""
        engine.attempt += 1
        engine.held.clear()
        engine.version = self.draw.randint(0, self.step)

    def train(self) -> bool:
        step = self.step + 1
        if step > self.core.policy.total_steps or self.core.take(step, self.trainer):
            return False
        if self.draw.random() < 0.8:  # otherwise it is fixed, and trained later
            self.core.commit(step, step, self.trainer, {})
        return True

    def rewind(self) -> None:
        self.trainer += 1
        self.core.rewind(max(0, self.step - self.draw.randint(1, 3)), self.trainer)
        for engine in self.engines:
            if self.draw.random() < 0.8:
                self.give_weights(engine, min(engine.version, self.step))

    def event(self) -> None:
        engine = self.draw.choice(self.engines)
        of_leases: dict[Callable[[Engine], None], float] = {
            self.finish: 16,
            partial(self.finish, drop=True): 1,
            partial(self.finish, fail=True): 1,
            self.give_back: 2,
        }
        others: dict[Callable[[Engine], object], float] = {
            lambda engine: self.lease(engine, self.draw.randint(1, 2 * self.size)): 8,
            lambda engine: self.give_weights(
                engine, max(engine.version, self.step - self.draw.randint(0, 2))
            ): 4,
            self.replace: 0.5,
            lambda _: self.expire(): 0.3,
            lambda _: self.train(): 8,
            lambda _: self.rewind(): 0.2,
        }
        events = others | (of_leases if engine.held else {})
        (event,) = self.draw.choices(list(events), list(events.values()))
        event(engine)

    def expire(self) -> None:
        """All leases run out; the engines go on all the same."""
        self.buffer.clock.now += 70
        self.core.expire()

    def check(self) -> None:
        """Outstanding groups fit into the steps until they are due; no stale group is trained."""
        memory, policy = self.core.memory, self.core.policy
        assert self.buffer.counters["stale_groups"] == 0
        by_due: Counter[int] = Counter()
        for group in memory.groups.values():
            if group.state in (GroupState.LEASED, GroupState.FINISHED):
                by_due[due(policy, group.version)] += 1
        total = 0
        for last in sorted(by_due):
            total += by_due[last]
            assert total <= (last - memory.next_batch + 1) * policy.batch_size

    def to_the_end(self) -> None:
        """All engines get the newest weights and finish all that they lease: each round trains."""
        while self.step < self.core.policy.total_steps:
            for engine in self.engines:
                self.give_weights(engine, max(engine.version, self.step))
            leased = True
            while leased:
                leased = sum(self.lease(engine, 100) for engine in self.engines) > 0
                for engine in self.engines:
                    while engine.held:
                        self.finish(engine)
                    self.check()
            assert self.train(), self.core.waiting_for()
            self.check()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(1, 8),
    size=st.integers(1, 4),
    events=st.integers(0, 400),
)
def test_any_schedule_keeps_the_bound_and_goes_on(
    seed: int, staleness: int, size: int, events: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        run = Run(Path(root), random.Random(seed), staleness, size)
        try:
            for _ in range(events):
                run.event()
                run.check()
            run.to_the_end()
            run.buffer.check()
        finally:
            run.buffer.close()
