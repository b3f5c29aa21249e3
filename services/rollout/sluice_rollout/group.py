"""One prompt group: its samples generated side by side, continued where an earlier lease left them,
and scored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.api import EvaluationDataset, Reward, RLJobSpec
from sluice.data.chat import PromptError
from sluice.input_checks import InputError
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judging.judge import Judge
from sluice.rewards.terms import with_terms
from sluice.rewards.types import Judgement
from sluice.runtime.gather import gather
from sluice.samples.sample import (
    BASELINE_REWARD,
    PROMPT_TOO_LONG,
    Prompt,
    Purpose,
    Sample,
    SampleError,
    SampleGroup,
    SampleStatus,
)
from sluice.samples.turns import check_turns
from sluice.telemetry import logs, tracing
from sluice.wire.membership import Membership
from sluice_rollout import failures
from sluice_rollout.episode import Episode, Play
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.generate import Generator, sampling_params
from sluice_rollout.load import SHARE
from sluice_rollout.prompts import PromptEncoder, PromptTooLongError
from sluice_rollout.scoring import seat_rewards
from sluice_rollout.scoring.teacher import Teachers
from sluice_rollout.user_functions.hooks import Hooks
from sluice_rollout.user_functions.loaded import Code
from sluice_rollout.user_functions.runner import EpisodeRunner

SHOWN_REFUSALS = 10
"""Prompts of a source that one worker's log names; all are counted by the buffer."""


@dataclass(slots=True)
class GroupMaker:
    """Makes groups; counts what it has made."""

    spec: RLJobSpec
    encoder: PromptEncoder
    generator: Generator
    judge: Judge | None
    membership: Membership
    player: EpisodeRunner | None = None
    hooks: Hooks = field(default_factory=Hooks)
    judges: Mapping[str, Judge] = field(default_factory=dict)
    """Judges of the evaluation data sets that have a reward of their own, by name."""
    players: Mapping[tuple[Purpose, str], EpisodeRunner | None] = field(default_factory=dict)
    """Of prompts whose source names a function of its own."""
    teacher: Teachers | None = None
    finished_samples: int = 0
    generated_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    async def __call__(self, prompt: Prompt, partial: list[Sample]) -> SampleGroup:
        """The group: finished and scored, or, after a drain, with samples that are not."""
        dataset = self._dataset(prompt)
        count = self.spec.rollout.samples_per_prompt
        if dataset is not None and self.spec.evaluation is not None:
            count = self.spec.evaluation.samples_of(dataset)
        SHARE.get().expect(count)
        group = SampleGroup(prompt, self._continued(partial, prompt, count))
        try:
            ids = self.encoder.encode(prompt)
        except PromptError as error:
            self._refuse(group, error)
            return group
        params = self._sampling(dataset)
        greedy = self._greedy(ids, params, prompt)
        _, baseline = await gather(self._fill(ids, group.samples, params, prompt), greedy)
        if baseline is not None:
            note_baseline(group, baseline)
        whole = all(sample.status.finished for sample in group.samples)
        if self._judges_groups(prompt):
            if not whole:  # after a drain: what is finished has no reward yet, and is judged later
                return group
            await self._score(group.samples, prompt)
        for sample in group.samples:
            if sample.status.finished:
                self._check(sample, prompt)
        return group

    def _check(self, sample: Sample, prompt: Prompt) -> None:
        """Fail a finished sample that the buffer would refuse, and the whole group with it."""
        try:
            sample.check()
            sample.check_vocabulary(self.encoder.embedding)
            check_turns(sample.metadata, len(sample.sequences), "metadata")
        except (SampleError, InputError) as error:
            line = f"a broken sample: {error}"
            where = f"{prompt.dataset} row {prompt.row}"
            failures.LOG.note("a sample is broken", line, at=where, index=sample.index)
            sample.fail(f"{line}\n{where}")
            sample.cut(0)
            sample.metadata, sample.response, sample.reward_parts = {}, "", {}

    def _refuse(self, group: SampleGroup, error: PromptError) -> None:
        """Nothing can be generated. A prompt that is too long is left out and counted; any other
        failure is one.
        """
        for sample in group.samples:
            sample.fail(str(error))
        self.refused[group.prompt.dataset] += 1
        if isinstance(error, PromptTooLongError):
            group.samples[0].metadata["filtered"] = PROMPT_TOO_LONG
        if self.refused[group.prompt.dataset] <= SHOWN_REFUSALS:
            logs.get().warning("prompt left out", error=str(error))

    async def _fill(
        self, ids: list[int], samples: list[Sample], params: dict[str, Any], prompt: Prompt
    ) -> None:
        """Make all samples of a prompt, each for itself, or together where the user's function
        wants them so.
        """
        player = self._player(prompt)
        parts = [samples] if player and player.whole_group else [[sample] for sample in samples]
        await gather(*(self._make(ids, part, params, prompt) for part in parts))

    async def _make(
        self, ids: list[int], samples: list[Sample], params: dict[str, Any], prompt: Prompt
    ) -> None:
        if all(self._is_made(sample, prompt) for sample in samples):
            SHARE.get().done(len(samples))
            return
        before = sum(map(_response_tokens, samples))
        await self._generate(ids, samples, params, prompt)
        # Not of what failed: its group ends, and where the engine did it, nobody leases for it.
        SHARE.get().done(len(samples))
        self.generated_tokens += max(0, sum(map(_response_tokens, samples)) - before)
        finished = [sample for sample in samples if sample.status.finished]
        self.finished_samples += len(finished)
        if self.teacher and self._has_teacher(prompt):
            await gather(
                *(self.teacher(prompt, s) for s in finished if s.status is not SampleStatus.FAILED)
            )
        if not self._judges_groups(prompt):
            await self._score(finished, prompt)

    def _is_made(self, sample: Sample, prompt: Prompt) -> bool:
        """By an earlier lease, and judged as far as a sample can be alone."""
        taught = sample.teacher_log_probs is not None or not self._has_teacher(prompt)
        return (
            sample.status.finished
            and taught
            and (sample.reward is not None or self._judges_groups(prompt))
        )

    async def _generate(
        self, ids: list[int], samples: list[Sample], params: dict[str, Any], prompt: Prompt
    ) -> None:
        """By the user's function where there is one, else the model's one answer to the prompt."""
        player = self._player(prompt)
        if player is None:
            await gather(*(self.generator(ids, sample, params) for sample in samples))
        elif player.whole_group:
            await player.group(prompt, ids, samples, params)
        else:
            await gather(*(player(prompt, ids, sample, params) for sample in samples))

    def _player(self, prompt: Prompt) -> EpisodeRunner | None:
        return self.players.get((prompt.purpose, prompt.dataset), self.player)

    async def _greedy(
        self, ids: list[int], params: dict[str, Any], prompt: Prompt
    ) -> Sample | None:
        """The greedy response with which a prompt's samples are compared: scored, but none of the
        group's own.
        """
        if not self.spec.algorithm.kind.greedy or prompt.purpose is not Purpose.TRAIN:
            return None
        sample = Sample(index=-1, metadata={"baseline": True})
        await self._generate(ids, [sample], params | {"temperature": 0.0}, prompt)
        await self._score([sample], prompt)
        return sample

    def _continued(self, partial: list[Sample], prompt: Prompt, count: int) -> list[Sample]:
        """The group's samples: those returned by an earlier lease go on where they stopped, if the
        weights allow it.
        """
        returned = {sample.index: sample for sample in partial}
        return [
            returned[i]
            if i in returned and self._may_continue(returned[i], prompt)
            else Sample(index=i)
            for i in range(count)
        ]

    def _may_continue(self, sample: Sample, prompt: Prompt) -> bool:
        """Tokens of other weights may stay only where partial rollouts are wanted,
        never in an evaluation.
        """
        on_policy = sample.versions <= {self.membership.version}
        return on_policy or (self.spec.rollout.partial.enabled and prompt.purpose is Purpose.TRAIN)

    def _dataset(self, prompt: Prompt) -> EvaluationDataset | None:
        if prompt.purpose is Purpose.TRAIN or self.spec.evaluation is None:
            return None
        return next(d for d in self.spec.evaluation.datasets if d.source_name == prompt.dataset)

    def _reward(self, prompt: Prompt) -> Reward | None:
        dataset = self._dataset(prompt)
        return dataset.reward if dataset and dataset.reward else self.spec.reward

    def _judges_groups(self, prompt: Prompt) -> bool:
        reward = self._reward(prompt)
        return reward is not None and reward.group

    def _has_teacher(self, prompt: Prompt) -> bool:
        return self.teacher is not None and prompt.purpose is Purpose.TRAIN

    def _sampling(self, dataset: EvaluationDataset | None) -> dict[str, Any]:
        base = self.spec.rollout.sampling
        if dataset is None or self.spec.evaluation is None:
            return sampling_params(base)
        merged = self.spec.evaluation.sampling.model_dump(exclude_none=True)
        merged |= dataset.sampling.model_dump(exclude_none=True) if dataset.sampling else {}
        return sampling_params(base, type(self.spec.evaluation.sampling).model_validate(merged))

    async def _score(self, samples: list[Sample], prompt: Prompt) -> None:
        """Set rewards where the user's function gave none. One that cannot be had fails its sample
        with the reason.

        A job without a reward has 0 for all: its teacher is what it learns from (slime).
        """
        await gather(*(self.hooks.before_reward(prompt, sample) for sample in samples))
        finished = [s for s in samples if s.status.finished and s.status is not SampleStatus.FAILED]
        judged = [(s, seat) for s in finished for seat in seat_rewards.missing(s)]
        inputs = [seat_rewards.judged(prompt, s, seat, self._text) for s, seat in judged]
        judge = (
            self.judges.get(prompt.dataset, self.judge)
            if prompt.purpose is Purpose.EVALUATE
            else self.judge
        )
        with tracing.span("reward", samples=len(inputs)):
            outcomes = await judge(inputs) if judge and inputs else [(0.0, {})] * len(inputs)
        for (sample, seat), seen, outcome in zip(judged, inputs, outcomes, strict=True):
            if isinstance(outcome, RewardError):
                where = f"{prompt.dataset} row {prompt.row}"
                failures.LOG.note(
                    "a reward failed", str(outcome), outcome.details, at=where, index=sample.index
                )
                sample.fail(f"reward: {outcome}\n{where}")
            elif sample.status is not SampleStatus.FAILED:  # by another seat's
                seat_rewards.give(sample, seat, self._with_terms(outcome, seen, prompt))
        for sample in finished:
            if sample.status is not SampleStatus.FAILED:
                seat_rewards.settle(sample)
        await gather(*(self.hooks.after_reward(prompt, sample) for sample in samples))

    def _text(self, tokens: list[int], stop: str | None) -> str:
        return self.generator.text(tokens, stop)

    def _with_terms(self, outcome: Judgement, sample: RewardInput, prompt: Prompt) -> Judgement:
        reward = self.spec.reward
        if prompt.purpose is Purpose.EVALUATE or reward is None or not reward.terms:
            return outcome
        return with_terms(outcome, sample, reward.terms, reward.key)


def group_maker(
    spec: RLJobSpec,
    encoder: PromptEncoder,
    generator: Generator,
    membership: Membership,
    code: Code,
    teacher: Teachers | None = None,
    open_gateway: Callable[[Episode], Gateway] | None = None,
) -> GroupMaker:
    """The maker of a job's groups, with the user's code in its places.

    open_gateway: opens the gateway to an episode.
    """

    def player(named: tuple[str, Play] | None) -> EpisodeRunner | None:
        if named is None:
            return None
        name, play = named
        key = spec.reward.key if spec.reward else None
        return EpisodeRunner(
            play, name, generator, encoder.tokenizer, spec.rollout.function_seconds, key,
            open_gateway, tuple(seat.name for seat in spec.rollout.seats),
        )  # fmt: skip

    return GroupMaker(
        spec,
        encoder,
        generator,
        code.judge,
        membership,
        player(code.plays.default),
        hooks=code.hooks,
        judges=code.judges,
        players={key: player(named) for key, named in code.plays.of.items()},
        teacher=teacher,
    )


def note_baseline(group: SampleGroup, greedy: Sample) -> None:
    """Write the reward of the greedy response into each sample's metadata.

    Without it the group is worth nothing: it fails with the greedy response, and where that was cut
    off by a drain the group is not finished either, so one sample is made again, beside a new
    greedy response, under the next lease.
    """
    if greedy.status is SampleStatus.FAILED:
        for sample in group.samples:
            sample.fail(f"the greedy response that remax compares with failed: {greedy.error}")
    elif not greedy.status.finished:
        if all(sample.status.finished for sample in group.samples):
            group.samples[-1] = Sample(index=group.samples[-1].index)
    else:
        for sample in group.samples:
            sample.metadata[BASELINE_REWARD] = greedy.reward


def _response_tokens(sample: Sample) -> int:
    """Tokens of a response, those once that its branches have in common."""
    return sample.response_length + sum(int(b.loss_mask.sum()) for b in sample.branches)


def mask_off_policy(sample: Sample) -> None:
    """Train only on tokens of the newest weights that a sample has seen (slime:
    mask_offpolicy_in_partial_rollout).
    """
    newest = max(sample.versions, default=0)
    for sequence in sample.sequences:
        mask = sequence.loss_mask.copy()
        for span in sequence.weight_versions:
            if span.version < newest:
                mask[span.start : span.end] = 0
        sequence.loss_mask = mask
