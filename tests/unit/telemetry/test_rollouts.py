"""Dumped rollouts are read back bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sluice.samples.sample import (
    Prompt,
    Sample,
    SampleGroup,
    SampleStatus,
    TokenSequence,
    WeightSpan,
)
from sluice.telemetry import rollouts


def groups() -> list[SampleGroup]:
    whole = Sample(0)
    whole.append_prompt([5, 6])
    whole.append([7, 8], [-0.1, -1.5e-7], [WeightSpan(2, 0, 2)])
    whole.append([9], [], [WeightSpan(3, 0, 1)], trainable=False)
    whole.status, whole.reward, whole.response = SampleStatus.COMPLETED, 0.1, "ä\n<b>"
    whole.reward_parts, whole.metadata = {"score": 0.1}, {"turns": [{"by": "model", "length": 2}]}
    whole.teacher_log_probs = np.array([-0.3, -2.5e-7, 0.0], np.float32)
    whole.routed_experts = np.array([[1, 0], [2, 3]], np.uint8)
    whole.images, whole.image_tokens = ["0a" * 32], 3
    branch = TokenSequence(tokens=np.array([5, 6, 7], np.int32))
    branch.append([1, 2], [-0.2, -3e-7], [WeightSpan(3, 0, 2)])
    whole.branches = [branch]
    failed = Sample(1)
    failed.append_prompt([5, 6])
    failed.fail("no reward")
    chat = [{"role": "user", "content": "é"}]
    prompt = Prompt(
        7,
        chat,
        label={"x": [1]},
        metadata={"k": None},
        tools=[{"name": "t"}],
        dataset="d",
        row=3,
        epoch=1,
    )
    return [SampleGroup(prompt, [whole, failed]), SampleGroup(Prompt(9, "plain"), [])]


def test_a_dumped_step_is_read_back(tmp_path: Path) -> None:
    path = rollouts.write(tmp_path / "rollouts", 12, groups())
    assert path == tmp_path / "rollouts/step_0000012.parquet"
    [group] = rollouts.read(path)
    expected = groups()[0]
    assert group.prompt == expected.prompt
    for a, b in zip(group.samples, expected.samples, strict=True):
        for sequence, other in zip(a.sequences, b.sequences, strict=True):
            for name in ("tokens", "loss_mask", "rollout_log_probs"):
                np.testing.assert_array_equal(getattr(sequence, name), getattr(other, name))
                assert getattr(sequence, name).dtype == getattr(other, name).dtype
            np.testing.assert_array_equal(sequence.teacher_log_probs, other.teacher_log_probs)
            np.testing.assert_array_equal(sequence.routed_experts, other.routed_experts)
            assert sequence.weight_versions == other.weight_versions
            assert sequence.response_length == other.response_length
            assert (sequence.images, sequence.image_tokens) == (other.images, other.image_tokens)
        for name in (
            "index",
            "response",
            "reward",
            "reward_parts",
            "status",
            "metadata",
            "error",
        ):
            assert getattr(a, name) == getattr(b, name)


def test_dumps_without_branches_are_read(tmp_path: Path) -> None:
    from pyarrow import parquet

    path = rollouts.write(tmp_path, 1, groups())
    parquet.write_table(parquet.read_table(path).drop_columns(["branches"]), path)
    assert [sample.branches for sample in rollouts.read(path)[0].samples] == [[], []]


def test_steps_are_found_in_their_order(tmp_path: Path) -> None:
    for step in (10, 2):
        rollouts.write(tmp_path, step, groups()[:1])
    (tmp_path / "step_x.parquet").touch()
    assert list(rollouts.steps(tmp_path)) == [2, 10]


def test_another_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "step_0000001.parquet").write_text("hello")
    with pytest.raises(
        rollouts.DumpError, match=r"step_0000001.parquet: not a step that debug.dumpRollouts wrote"
    ):
        rollouts.read(tmp_path / "step_0000001.parquet")


def test_dumps_without_teachers_are_read(tmp_path: Path) -> None:
    from pyarrow import parquet

    path = rollouts.write(tmp_path, 3, groups())
    parquet.write_table(parquet.read_table(path).drop_columns(["teacher_log_probs"]), path)
    [group] = rollouts.read(path)
    assert [sample.teacher_log_probs for sample in group.samples] == [None, None]
