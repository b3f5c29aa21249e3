"""Hooks of the user, and the judges of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.images.image import Image
from sluice.rewards import RewardInput
from sluice.runtime import user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Purpose, Sample, SampleStatus
from sluice.wire import codec
from sluice_rollout.group import GroupMaker
from sluice_rollout.scoring.scorer import Scorer
from sluice_rollout.user_functions import hooks, loading
from tests.unit.buffer.buffer_tools import make_job

CODE = """
def strip(prompt, sample):
    sample.response = sample.response.rpartition("</think>")[2]

async def halve(prompt, sample):
    sample.reward /= 2
    if prompt.label == "unsure":
        sample.loss_mask = sample.loss_mask * 0

def crash(prompt, sample):
    sample.tokens = sample.tokens[:1]
    raise KeyError("x")

def breaks(prompt, sample):
    sample.loss_mask = sample.loss_mask[:1]

def play(episode):
    pass
"""


class Parts:
    """Engine, encoder, judge and membership in memory."""

    latest = None
    embedding: int | None = None

    def __init__(self) -> None:
        self.seen: list[RewardInput] = []

    def encode(self, prompt: Prompt, images: Sequence[Image] = ()) -> list[int]:
        return [1, 2]

    async def generator(self, ids: list[int], sample: Sample, params: dict[str, Any]) -> Sample:
        sample.append_prompt(ids)
        sample.append([7, 8], [-0.5, -0.5], [])
        sample.status, sample.response = SampleStatus.COMPLETED, "hm</think>4"
        return sample

    def judge(self, reward: float) -> Any:
        async def judge(inputs: list[RewardInput]) -> list[Any]:
            self.seen += inputs
            return [(reward, {}) for _ in inputs]

        return judge


@pytest.fixture
def code(tmp_path: Path) -> str:
    user_code.load.cache_clear()
    (tmp_path / "code.py").write_text(CODE)
    return f"{tmp_path}/code.py"


def maker(
    parts: Any,
    own: hooks.Hooks | None = None,
    terms: Sequence[dict[str, Any]] = (),
    **judges: Any,
) -> GroupMaker:
    spec = RLJobSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts": [{"path": "p"}]},
            "reward": {"type": "f1", "terms": list(terms)},
            "trainer": {"steps": 1},
            "rollout": {"samplesPerPrompt": 2},
            "evaluation": {
                "datasets": [
                    {"path": "easy", "reward": {"type": "contains"}},
                    {"path": "hard", "samplesPerPrompt": 3},
                ]
            },
        }
    )
    return GroupMaker(
        spec,
        parts,
        parts.generator,
        Scorer(spec, lambda tokens, stop: "", parts.judge(1.0), judges, own or hooks.Hooks()),
        parts,
    )


async def test_a_hook_before_the_reward_changes_what_is_judged_and_one_after_it_the_reward(
    code: str,
) -> None:
    parts = Parts()
    own = hooks.Hooks(
        hooks.load("beforeReward", f"{code}:strip"), hooks.load("afterReward", f"{code}:halve")
    )
    group = await maker(parts, own).make(Prompt(0, "2+2", label="unsure"), [])
    assert [seen.response for seen in parts.seen] == ["4", "4"]
    assert [sample.reward for sample in group.samples] == [0.5, 0.5]
    assert [sample.trainable_tokens for sample in group.samples] == [0, 0]
    group.check_finished(2)


async def test_terms_are_added_to_the_rewards_of_training_alone() -> None:
    """A response of `hm</think>4` in a template that opens `<think>`: 1 + 0.5."""
    terms = [{"type": "format", "opened": True, "weight": 0.5}]
    training = maker(Parts(), terms=terms)
    group = await training.make(Prompt(0, "2+2", label="4"), [])
    assert [sample.reward for sample in group.samples] == [1.5, 1.5]
    assert group.samples[0].reward_parts == {"score": 1.0, "format": 1.0}
    held_out = Prompt(1, "2+2", label="4", dataset="hard", purpose=Purpose.EVALUATE)
    evaluated = await training.make(held_out, [])
    assert [sample.reward for sample in evaluated.samples] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("name", "error"), [
    ("crash", "KeyError: 'x' (code.py:12)"),
    ("breaks", "SampleError: samples[0].lossMask: 1 entries for 2 response tokens"),
])  # fmt: skip
async def test_a_hook_that_goes_wrong_fails_its_sample(code: str, name: str, error: str) -> None:
    hook = hooks.load("beforeReward", f"{code}:{name}")
    group = await maker(Parts(), hooks.Hooks(hook)).make(Prompt(0, "2+2"), [])
    assert group.samples[0].error == f"hook {code}:{name}: {error}"
    group.check_finished(2)


def test_hooks_and_functions_that_cannot_be_loaded(code: str, tmp_path: Path) -> None:
    spec = make_job(tmp_path).spec
    with pytest.raises(
        ConfigurationError, match=r"spec\.rollout\.hooks\.afterReward: .*has no function 'none'"
    ):
        hooks.load("afterReward", f"{code}:none")
    with pytest.raises(
        ConfigurationError, match=r"spec\.rollout\.function: .*has no function 'none'"
    ):
        loading.load_function(f"{code}:none", spec)
    with pytest.raises(
        ConfigurationError,
        match=r"code\.py:play is not async: expected `async def play\(episode\)`",
    ):
        loading.load_function(f"{code}:play", spec)


async def test_a_data_set_that_names_a_reward_is_judged_by_it() -> None:
    parts = Parts()
    make = maker(parts, easy=parts.judge(0.25))
    for dataset, purpose, expected in (
        ("easy", Purpose.EVALUATE, [0.25]),
        ("hard", Purpose.EVALUATE, [1.0] * 3),
        ("easy", Purpose.TRAIN, [1.0] * 2),
    ):
        group = await make.make(Prompt(0, "2+2", dataset=dataset, purpose=purpose), [])
        assert [sample.reward for sample in group.samples] == expected


async def test_a_sample_that_has_its_reward_is_not_judged() -> None:
    parts = Parts()
    make = maker(parts)
    generate = parts.generator

    async def rewarded(ids: list[int], sample: Sample, params: dict[str, Any]) -> Sample:
        sample.reward = 0.75 if sample.index else None
        return await generate(ids, sample, params)

    make.generator = rewarded  # type: ignore[assignment]
    group = await make.make(Prompt(0, "2+2"), [])
    assert ([sample.reward for sample in group.samples], len(parts.seen)) == ([1.0, 0.75], 1)


@pytest.mark.parametrize(
    ("embedding", "reward", "error"),
    [
        pytest.param(9, 1.0, "tokens: token id 9, expected ids below 9, the model", id="a token"),
        pytest.param(None, 6e14, "reward is 1200000000000000.0, expected a finite", id="a sum"),
    ],
)
async def test_a_sample_that_the_buffer_would_refuse_fails_alone(
    embedding: int | None, reward: float, error: str
) -> None:
    """A hook doubles the reward, and no other code has looked at it before."""

    async def doubles(prompt: Prompt, sample: Sample) -> None:
        if sample.index == 1:
            assert sample.reward is not None
            sample.reward *= 2
            sample.tokens = sample.tokens + 1

    parts = Parts()
    parts.embedding = embedding
    make = maker(parts, hooks.Hooks(after_reward=doubles))
    make.scorer.judge = parts.judge(reward)
    group = await make.make(Prompt(0, "2+2"), [])
    assert [sample.status for sample in group.samples] == [
        SampleStatus.COMPLETED,
        SampleStatus.FAILED,
    ]
    assert f"a broken sample: samples[1].{error}" in group.samples[1].error
    group.check_finished(2)
    codec.group_to_message(group).SerializeToString()
