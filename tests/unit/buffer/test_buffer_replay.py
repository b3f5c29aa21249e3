"""Batches from dumped rollouts: the same samples in the same order, with nobody else at work."""

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
from tests.unit.buffer.buffer_tools import House, make_group, make_job, shard_group

Make = Callable[..., House]


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


def replayed(house: Make, dump: Path, **changes: object) -> House:
    return house(debug__replay=str(dump), rollout__replicas=0, trainer__steps=9, **changes)


def first_tokens(one: House, step: int) -> list[int]:
    """The numbers that `make_group` wrote into its samples: each group's in the run that was
    dumped."""
    ids = one.buffer.memory.batches[step]
    data = [shard_group(one.buffer, group_id, [0]) for group_id in ids]
    return [int(np.frombuffer(group.samples[0].tokens, dtype="<i4")[0]) for group in data]


def test_dumped_steps_become_the_batches_of_the_first_steps(house: Make, dump: Path) -> None:
    one = replayed(house, dump, rollout__dynamicFilter="nonzero_std", evaluation={})
    assert one.stats.total_steps == 2
    assert one.step(1) == [0, 1, 2, 3]
    assert {s.min_version for s in one.buffer.sequences(1, 1)} == {0}
    one.restart()
    assert one.step(2) == [4, 5, 6, 7]
    assert [s.reward for s in one.buffer.sequences(2, 1)] == [0, 1] * 4
    assert one.stats.policy_lag == 1
    assert one.buffer.batches.exhausted
    one.check()


def test_the_samples_are_those_of_the_dump(house: Make, dump: Path) -> None:
    one = replayed(house, dump)
    one.step(1)
    assert first_tokens(one, 1) == [40, 41, 43, 47]
    one.step(2)
    assert first_tokens(one, 2) == [42, 44, 45, 46]


def test_a_step_is_taken_again_after_a_rewind(house: Make, dump: Path) -> None:
    one = replayed(house, dump)
    one.step(1)
    assert one.buffer.rewind(0, 1) == 1
    assert one.step(1) == [0, 1, 2, 3]
    one.check()


def test_a_directory_without_a_dump_is_a_mistake_in_the_manifest(
    house: Make, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"spec\.debug\.replay: .*/none has no step_<n>\.parquet"
    ):
        replayed(house, tmp_path / "none")


@pytest.mark.parametrize(("changes", "error"), [
    ({"rollout__batchSize": 3}, "step_0000011.parquet has 4 groups, rollout.batchSize is 3"),
    ({"rollout__samplesPerPrompt": 4}, "has 2 samples a group, rollout.samplesPerPrompt is 4"),
])  # fmt: skip
def test_a_dump_of_another_size_is_refused(
    house: Make, dump: Path, changes: dict[str, int], error: str
) -> None:
    one = replayed(house, dump, **changes)
    with pytest.raises(PreconditionError, match=error):
        one.buffer.take(1, 1)
    assert one.counters["groups_leased"] == 0


def test_the_manifest_must_ask_for_no_engines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set rollout\.replicas: 0"):
        make_job(tmp_path, debug__replay="x", rollout__replicas=1)
