"""remax: the greedy response is scored and noted, and is not a sample of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.images.image import Image
from sluice.rewards import RewardError, RewardInput
from sluice.samples.sample import (
    BASELINE_REWARD,
    Prompt,
    Purpose,
    Sample,
    SampleGroup,
    SampleStatus,
)
from sluice_rollout.group import GroupMaker, note_baseline
from sluice_rollout.scoring.scorer import Scorer

PROMPT = Prompt(3, "max 1 2 =", label="2")


class Parts:
    """Engine, encoder, judge and membership in memory: what a group maker talks to."""

    latest = None
    embedding = None

    def __init__(self, greedy: str = "finished") -> None:
        self.greedy = greedy
        self.temperatures: list[float] = []

    def encode(self, prompt: Prompt, images: Sequence[Image] = ()) -> list[int]:
        return [1, 2]

    async def generator(self, ids: list[int], sample: Sample, params: dict[str, Any]) -> Sample:
        self.temperatures.append(params["temperature"])
        greedy = params["temperature"] == 0
        sample.append_prompt(ids)
        sample.append([7], [-0.5], [])
        sample.status = SampleStatus.COMPLETED
        if greedy and self.greedy == "drained":
            sample.status = SampleStatus.ABORTED
        if greedy and self.greedy == "failed":
            sample.fail("the engine said no")
        return sample

    async def judge(self, inputs: list[RewardInput]) -> list[Any]:
        if self.greedy == "unjudged" and any("baseline" in i.metadata for i in inputs):
            return [RewardError("no idea") for _ in inputs]
        return [(0.25 if "baseline" in i.metadata else 1.0, {}) for i in inputs]


def maker(parts: Parts, estimator: str) -> GroupMaker:
    spec = RLJobSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts": [{"path": "p"}]},
            "reward": {"type": "f1"},
            "trainer": {"steps": 1},
            "rollout": {"samplesPerPrompt": 2, "sampling": {"temperature": 0.7}},
            "algorithm": {"estimator": estimator},
        }
    )
    fakes: Any = parts
    scorer = Scorer(spec, lambda tokens, stop: "", fakes.judge)
    return GroupMaker(spec, fakes, fakes.generator, scorer, fakes)


async def test_the_reward_of_the_greedy_response_is_in_each_samples_metadata() -> None:
    parts = Parts()
    group = await maker(parts, "remax").make(PROMPT, [])
    assert sorted(parts.temperatures) == [0, 0.7, 0.7]
    assert [s.index for s in group.samples] == [0, 1]
    assert [s.reward for s in group.samples] == [1, 1]
    assert [s.metadata[BASELINE_REWARD] for s in group.samples] == [0.25, 0.25]
    group.check_finished(2)


async def test_other_estimators_make_no_greedy_response() -> None:
    parts = Parts()
    group = await maker(parts, "grpo").make(PROMPT, [])
    assert parts.temperatures == [0.7, 0.7]
    assert not any(BASELINE_REWARD in s.metadata for s in group.samples)


async def test_an_evaluation_makes_no_greedy_response() -> None:
    parts = Parts()
    await maker(parts, "remax").make(Prompt(3, "x", purpose=Purpose.TRAIN), [])
    assert 0 in parts.temperatures
    group = SampleGroup(Prompt(3, "x", purpose=Purpose.EVALUATE))
    assert (
        await maker(parts, "remax")._greedy_baseline([1], {"temperature": 1.0}, group.prompt)
        is None
    )


@pytest.mark.parametrize(
    ("greedy", "reason"), [("failed", "the engine said no"), ("unjudged", "no idea")]
)
async def test_a_group_without_a_baseline_fails(greedy: str, reason: str) -> None:
    group = await maker(Parts(greedy), "remax").make(PROMPT, [])
    assert {s.status for s in group.samples} == {SampleStatus.FAILED}
    assert all(reason in s.error for s in group.samples)
    group.check_finished(2)


async def test_a_group_whose_greedy_response_was_cut_off_is_not_finished() -> None:
    group = await maker(Parts("drained"), "remax").make(PROMPT, [])
    assert [s.status for s in group.samples] == [SampleStatus.COMPLETED, SampleStatus.PENDING]
    assert [s.index for s in group.samples] == [0, 1]


def test_a_sample_that_a_drain_cut_off_too_keeps_its_tokens() -> None:
    begun = Sample(0, status=SampleStatus.ABORTED)
    begun.append_prompt([1])
    begun.append([5, 6], [-1.0, -1.0], [])
    group = SampleGroup(PROMPT, [begun])
    note_baseline(group, Sample(-1, status=SampleStatus.ABORTED))
    assert group.samples[0].response_length == 2


def test_the_baseline_survives_encoding() -> None:
    from sluice.wire import codec

    group = SampleGroup(PROMPT, [Sample(0, reward=1.0, status=SampleStatus.COMPLETED)])
    note_baseline(group, Sample(-1, reward=0.5, status=SampleStatus.TRUNCATED))
    again = codec.group_from_message(codec.group_to_message(group))
    assert again.samples[0].metadata[BASELINE_REWARD] == 0.5
