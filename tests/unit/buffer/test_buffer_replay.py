"""Batches from dumped rollouts: the same samples in the same order, without workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import SampleGroup
from sluice.telemetry import rollouts
from sluice.wire import codec
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.errors import PreconditionError
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group, make_job, shard_group

MakeBuffer = Callable[..., LocalBuffer]


def groups(ids: list[int], version: int) -> list[SampleGroup]:
    return [
        codec.group_from_message(
            make_group(pb.Prompt(group_id=i, prompt_json='"?"'), version=version)
        )
        for i in ids
    ]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Steps 11 and 12 of a job that took what finished first."""
    directory = tmp_path / "rollouts"
    rollouts.write(directory, 11, groups([40, 41, 43, 47], 10))
    rollouts.write(directory, 12, groups([42, 44, 45, 46], 10))
    return directory


def replayed(make_buffer: MakeBuffer, dump: Path, **changes: object) -> LocalBuffer:
    return make_buffer(debug__replay=str(dump), rollout__replicas=0, trainer__steps=9, **changes)


def first_tokens(buffer: LocalBuffer, step: int) -> list[int]:
    """Return the numbers that `make_group` wrote into the samples of a step.

    Each is the group's number in the dumped run.
    """
    ids = buffer.core.memory.batches[step]
    data = [shard_group(buffer.core, group_id, [0]) for group_id in ids]
    return [int(np.frombuffer(group.samples[0].tokens, dtype="<i4")[0]) for group in data]


def test_dumped_steps_become_the_batches_of_the_first_steps(
    make_buffer: MakeBuffer, dump: Path
) -> None:
    buffer = replayed(make_buffer, dump, rollout__dynamicFilter="nonzero_std", evaluation={})
    assert buffer.stats.total_steps == 2
    assert buffer.step(1) == [0, 1, 2, 3]
    assert {s.min_version for s in buffer.core.sequences(1, 1)} == {0}
    buffer.restart()
    assert buffer.step(2) == [4, 5, 6, 7]
    assert [s.reward for s in buffer.core.sequences(2, 1)] == [0, 1] * 4
    assert buffer.stats.policy_lag == 1
    assert buffer.core.batches.exhausted
    buffer.check()


def test_the_samples_are_those_of_the_dump(make_buffer: MakeBuffer, dump: Path) -> None:
    buffer = replayed(make_buffer, dump)
    buffer.step(1)
    assert first_tokens(buffer, 1) == [40, 41, 43, 47]
    buffer.step(2)
    assert first_tokens(buffer, 2) == [42, 44, 45, 46]


def test_a_step_is_taken_again_after_a_rewind(make_buffer: MakeBuffer, dump: Path) -> None:
    buffer = replayed(make_buffer, dump)
    buffer.step(1)
    assert buffer.core.rewind(0, 1) == 1
    assert buffer.step(1) == [0, 1, 2, 3]
    buffer.check()


def test_a_directory_without_a_dump_is_a_mistake_in_the_manifest(
    make_buffer: MakeBuffer, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"spec\.debug\.replay: .*/none has no step_<n>\.parquet"
    ):
        replayed(make_buffer, tmp_path / "none")


@pytest.mark.parametrize(("changes", "error"), [
    ({"rollout__batchSize": 3}, "step_0000011.parquet has 4 groups, rollout.batchSize is 3"),
    ({"rollout__samplesPerPrompt": 4}, "has 2 samples a group, rollout.samplesPerPrompt is 4"),
])  # fmt: skip
def test_a_dump_of_another_size_is_refused(
    make_buffer: MakeBuffer, dump: Path, changes: dict[str, int], error: str
) -> None:
    buffer = replayed(make_buffer, dump, **changes)
    with pytest.raises(PreconditionError, match=error):
        buffer.core.take(1, 1)
    assert buffer.counters["groups_leased"] == 0


def test_the_manifest_must_ask_for_no_engines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set rollout\.replicas: 0"):
        make_job(tmp_path, debug__replay="x", rollout__replicas=1)
