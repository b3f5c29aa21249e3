"""Generate functions that try several ways, or play all samples of a prompt in one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.engines.protocol import EngineError, Generation
from sluice.images.image import Image
from sluice.rewards import RewardInput
from sluice.runtime import user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Purpose, Sample, SampleStatus, WeightSpan
from sluice.samples.turns import TURNS
from sluice.wire import codec
from sluice_rollout.episode import Episode, EpisodeEndError, together, whole_group
from sluice_rollout.group import GroupMaker
from sluice_rollout.scoring.scorer import Scorer
from sluice_rollout.user_functions import loading
from tests.unit.rollout.scripted_engine import (
    PARAMS,
    PROMPT,
    Script,
    drain_after_the_last,
    run,
    scripted_runner,
)


async def best_of_three(episode: Episode) -> None:
    """A common start, three ways on, the one with the largest token kept."""
    await episode.generate()
    branches = [episode.branch() for _ in range(3)]
    await together(*(play_once(branch) for branch in branches))
    episode.adopt(max(branches, key=lambda branch: int(branch.sample.tokens[-1])))
    episode.observe([90])
    await episode.generate()


async def play_once(branch: Episode) -> None:
    await branch.generate()


async def test_the_best_branch_becomes_the_sample() -> None:
    engine = Script([10], [20], [40, 41], [30], [50])
    sample = await run(best_of_three, engine)
    assert engine.prompt_ids[1:4] == [[*PROMPT, 10]] * 3
    assert sample.tokens.tolist() == [*PROMPT, 10, 40, 41, 90, 50]
    assert sample.loss_mask.tolist() == [1, 1, 1, 0, 1]
    assert sample.rollout_log_probs.tolist() == [-0.5, -0.5, -0.5, 0, -0.5]
    assert sample.weight_versions == [WeightSpan(0, 0, 5)]
    assert [turn["length"] for turn in sample.metadata[TURNS]] == [1, 2, 1, 1]
    assert sample.status is SampleStatus.COMPLETED
    sample.check_tokens()


async def test_a_branch_that_is_not_adopted_is_dropped() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        branch = episode.branch()
        await branch.generate()
        branch.metadata["seen"] = True
        branch.reward(1.0)

    sample = await run(play, Script([10], [11]))
    assert (sample.tokens.tolist(), sample.reward) == ([*PROMPT, 10], None)
    assert "seen" not in sample.metadata


async def test_metadata_and_reward_of_a_branch_come_with_it() -> None:
    async def play(episode: Episode) -> None:
        branch = episode.branch()
        await branch.generate()
        branch.metadata["seen"] = True
        branch.reward(0.5)
        episode.adopt(branch)

    sample = await run(play, Script([10]))
    assert (sample.reward, sample.metadata["seen"], sample.response) == (0.5, True, "10")


async def test_a_branch_that_is_truncated_ends_alone() -> None:
    async def play(episode: Episode) -> None:
        short, long = episode.branch(), episode.branch()
        await together(play_once(long), play_once(short))
        episode.adopt(short)

    sample = await run(play, Script(list(range(10, 30)), [10]))
    assert (sample.status, sample.response_length) == (SampleStatus.COMPLETED, 1)


async def test_a_truncated_branch_makes_a_truncated_sample() -> None:
    async def play(episode: Episode) -> None:
        branch = episode.branch()
        await together(play_once(branch))
        episode.adopt(branch)

    sample = await run(play, Script(list(range(10, 30))))
    assert (sample.status, sample.response_length) == (SampleStatus.TRUNCATED, 10)


async def test_an_episode_of_another_prompt_cannot_be_adopted() -> None:
    strangers: list[Episode] = []

    async def play(episode: Episode) -> None:
        await episode.generate()
        strangers.append(episode)
        episode.adopt(strangers[0])

    assert (await run(play, Script([10]))).status is SampleStatus.COMPLETED
    assert (
        "adopt: the other episode answers another prompt" in (await run(play, Script([10]))).error
    )


async def test_a_lost_engine_in_a_branch_does_not_fail_the_function() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        try:
            await episode.branch().generate()
        except Exception as error:
            episode.metadata["error"] = str(error)

    with pytest.raises(EngineError, match="gone"):
        await run(play, Script([10], EngineError("gone")))


async def test_time_counts_only_while_no_branch_is_at_the_engine() -> None:
    class Slow(Script):
        async def generate(self, *arguments: Any, **options: Any) -> Generation:
            await asyncio.sleep(0.05 if len(self.prompt_ids) else 0.5)
            return await super().generate(*arguments, **options)

    async def play(episode: Episode) -> None:
        branches = [episode.branch() for _ in range(3)]
        await together(*(play_once(branch) for branch in branches))
        episode.adopt(branches[0])

    sample = await scripted_runner(play, Slow([10], [11], [12]), seconds=0.25)(
        Prompt(0, "?"), PROMPT, Sample(0), PARAMS
    )
    assert sample.status is SampleStatus.COMPLETED


@whole_group
async def tree(episodes: list[Episode]) -> None:
    """Play a common first turn; the others begin from it; the last is judged against the first."""
    await episodes[0].generate()
    for episode in episodes[1:]:
        episode.adopt(episodes[0])
    await together(*(play_once(episode) for episode in episodes))
    for rank, episode in enumerate(episodes):
        episode.reward(float(rank))


async def grouped(
    play: Any, engine: Script, *, count: int = 3, samples: list[Sample] | None = None
) -> list[Sample]:
    samples = samples or [Sample(index) for index in range(count)]
    await scripted_runner(play, engine).run_group(Prompt(0, "?"), PROMPT, samples, PARAMS)
    for sample in samples:
        codec.sample_to_message(sample)
    return samples


async def test_a_function_of_the_whole_group_plays_all_of_its_samples() -> None:
    samples = await grouped(tree, Script([10], [20], [30], [40]))
    assert [sample.tokens.tolist() for sample in samples] == [
        [*PROMPT, 10, last] for last in (20, 30, 40)
    ]
    assert [(sample.index, sample.reward, sample.status) for sample in samples] == [
        (index, float(index), SampleStatus.COMPLETED) for index in range(3)
    ]


async def test_an_exception_fails_the_group_and_a_broken_episode_its_sample() -> None:
    @whole_group
    async def crash(episodes: list[Episode]) -> None:
        await together(*(play_once(episode) for episode in episodes))
        raise KeyError("board")

    @whole_group
    async def half(episodes: list[Episode]) -> None:
        await episodes[0].generate()
        episodes[0].metadata["board"] = object()
        await episodes[1].generate()

    samples = await grouped(crash, Script([10], [11]), count=2)
    for sample in samples:
        assert sample.error.startswith(
            "mine.py:play raised KeyError: 'board' (test_whole_group.py:"
        )
    samples = await grouped(half, Script([10], [11]))
    assert [sample.status for sample in samples] == [
        SampleStatus.FAILED,
        SampleStatus.COMPLETED,
        SampleStatus.FAILED,
    ]
    assert samples[2].error == "mine.py:play ended before the model generated a token"


async def test_a_truncated_episode_truncates_no_other() -> None:
    @whole_group
    async def play(episodes: list[Episode]) -> None:
        for episode in episodes:
            await episode.generate()
        with contextlib.suppress(EpisodeEndError):
            episodes[0].observe([90] * 20)

    samples = await grouped(play, Script([10], [11]), count=2)
    assert [sample.status for sample in samples] == [SampleStatus.TRUNCATED, SampleStatus.COMPLETED]


async def test_an_interrupted_group_is_played_again_as_a_whole() -> None:
    """The first sample had ended when the pod did; it is no more finished than the others."""

    @whole_group
    async def play(episodes: list[Episode]) -> None:
        for episode in episodes:
            await episode.generate()

    engine = Script([10], "11")
    first = scripted_runner(play, engine)
    drain_after_the_last(engine, first)
    samples = [Sample(0), Sample(1)]
    await first.run_group(Prompt(0, "?"), PROMPT, samples, PARAMS)
    assert [sample.status for sample in samples] == [SampleStatus.ABORTED] * 2
    samples = [codec.sample_from_message(codec.sample_to_message(sample)) for sample in samples]
    other = Script([12])
    samples = await grouped(play, other, samples=samples)
    assert other.prompt_ids == [[*PROMPT, 11]]
    assert [sample.tokens.tolist() for sample in samples] == [[*PROMPT, 10], [*PROMPT, 11, 12]]


async def test_a_branch_cut_off_by_a_drain_aborts_even_where_the_function_swallows_that() -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        try:
            await episode.branch().generate()
        except EpisodeEndError:
            return

    engine = Script([10], "11")
    playing = scripted_runner(play, engine)
    drain_after_the_last(engine, playing)
    sample = await playing(Prompt(0, "?"), PROMPT, Sample(0), PARAMS)
    assert (sample.status, sample.tokens.tolist()) == (SampleStatus.ABORTED, [*PROMPT, 10])
    again = await run(best_of_three, Script([20], [21], [22], [23]), sample)
    assert again.tokens.tolist() == [*PROMPT, 10, 22, 90, 23]


# --- in a group maker


class Parts:
    """Engine, encoder, judge and membership in memory."""

    latest = None
    embedding = None

    def encode(self, prompt: Prompt, images: Sequence[Image] = ()) -> list[int]:
        return PROMPT

    async def generator(self, ids: list[int], sample: Sample, params: dict[str, Any]) -> Sample:
        sample.append_prompt(ids)
        sample.append([7], [-0.5], [])
        sample.status, sample.response = SampleStatus.COMPLETED, "plain"
        return sample

    async def judge(self, inputs: list[RewardInput]) -> list[Any]:
        return [(1.0 if judged.response == "plain" else 0.0, {}) for judged in inputs]


CODE = """
from sluice_rollout.episode import whole_group

async def single(episode):
    await episode.generate()

@whole_group
async def every(episodes):
    for rank, episode in enumerate(episodes):
        await episode.generate()
        episode.reward(rank)
"""


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., RLJobSpec]:
    user_code.load.cache_clear()
    (tmp_path / "play.py").write_text(CODE)

    def make(rollout: dict[str, Any], train: dict[str, Any], held_out: dict[str, Any]) -> RLJobSpec:
        for group in (rollout, train, held_out):
            if group.get("function", "none") != "none":
                group["function"] = f"{tmp_path}/play.py:{group['function']}"
        return RLJobSpec.model_validate(
            {
                "model": {"path": "m"},
                "data": {"prompts": [{"path": "t.jsonl", **train}]},
                "reward": {"type": "f1"},
                "trainer": {"steps": 1},
                "rollout": {"samplesPerPrompt": 2, **rollout},
                "evaluation": {
                    "datasets": [{"path": "e.jsonl", "samplesPerPrompt": 3, **held_out}]
                },
            }
        )

    return make


def maker(spec: RLJobSpec, engine: Script) -> GroupMaker:
    functions = loading.load_functions(spec)
    parts: Any = Parts()

    def runner_of(loaded: tuple[str, Any] | None) -> Any:
        return loaded and scripted_runner(loaded[1], engine)

    runners = {key: runner_of(loaded) for key, loaded in functions.by_source.items()}
    return GroupMaker(
        spec,
        parts,
        parts.generator,
        Scorer(spec, lambda tokens, stop: "", parts.judge),
        parts,
        runner_of(functions.default),
        runners,
    )


TRAIN = Prompt(0, "?", dataset="t")
HELD_OUT = Prompt(0, "?", dataset="e", purpose=Purpose.EVALUATE)


async def test_a_group_is_played_in_one_call_and_needs_no_judge(
    spec: Callable[..., RLJobSpec],
) -> None:
    make = maker(spec({"function": "every"}, {}, {}), Script([10], [11]))
    group = await make.make(TRAIN, [])
    assert [sample.reward for sample in group.samples] == [0.0, 1.0]
    group.check_finished(2)
    assert make.finished_samples == 2


@pytest.mark.parametrize(
    ("rollout", "train", "held_out", "expected"),
    [
        ({"function": "single"}, {}, {}, (0, 2, 3)),
        ({"function": "single"}, {}, {"function": "none"}, (0, 2, 0)),
        ({"function": "single"}, {"function": "none"}, {}, (0, 0, 3)),
        ({}, {}, {"function": "every"}, (0, 0, 3)),
        ({}, {}, {}, (0, 0, 0)),
    ],
    ids=str,
)
async def test_a_data_set_may_have_its_own_function_or_none(
    spec: Callable[..., RLJobSpec],
    rollout: dict[str, Any],
    train: dict[str, Any],
    held_out: dict[str, Any],
    expected: tuple[int, int, int],
) -> None:
    """Counted by what the function's engine was asked, in training and in evaluation."""
    engine = Script(*([n] for n in range(10, 20)))
    make = maker(spec(rollout, train, held_out), engine)
    counts = [0]
    for prompt in (TRAIN, HELD_OUT):
        group = await make.make(prompt, [])
        assert all(sample.status is SampleStatus.COMPLETED for sample in group.samples)
        counts.append(len(engine.prompt_ids) - sum(counts))
    assert tuple(counts) == expected


def test_a_function_that_cannot_be_loaded_is_named_by_its_field(
    spec: Callable[..., RLJobSpec],
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"spec.evaluation.datasets\[0\].function: .* has no function 'missing'",
    ):
        loading.load_functions(spec({}, {}, {"function": "missing"}))
