"""Gives finished samples their rewards, with the hooks of the job before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sluice.api import Reward, RLJobSpec
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judging.judge import Judge
from sluice.rewards.terms import with_terms
from sluice.rewards.types import Judgement
from sluice.runtime.gather import gather
from sluice.samples.sample import Prompt, Purpose, Sample, SampleStatus
from sluice.telemetry import failure_log, tracing
from sluice_rollout.prompts import evaluation_dataset
from sluice_rollout.scoring import seat_rewards
from sluice_rollout.user_functions.hooks import Hooks


@dataclass(slots=True)
class Scorer:
    """The rewards of one job."""

    spec: RLJobSpec
    # Response tokens as text, without the stop string that ended them.
    decode: Callable[[list[int], str | None], str]
    # Judges training samples, and evaluation data sets that name no reward. None: the job has no
    # reward, and a teacher is what it learns from.
    judge: Judge | None = None
    # Judges of the evaluation data sets that name a reward, by data set.
    dataset_judges: Mapping[str, Judge] = field(default_factory=dict)
    hooks: Hooks = field(default_factory=Hooks)

    def judges_groups(self, prompt: Prompt) -> bool:
        """Return True if the prompt's reward judges all samples of a group together."""
        reward = self._reward(prompt)
        return reward is not None and reward.group

    async def score(self, samples: list[Sample], prompt: Prompt) -> None:
        """Set the rewards that the user's function has not given.

        A sample whose reward cannot be had fails with the reason. Without a reward in the job,
        every sample gets 0 (as in slime).
        """
        await gather(*(self.hooks.before_reward(prompt, sample) for sample in samples))
        finished = [s for s in samples if s.status.finished and s.status is not SampleStatus.FAILED]
        judged = [(s, seat) for s in finished for seat in seat_rewards.missing(s)]
        inputs = [seat_rewards.reward_input(prompt, s, seat, self.decode) for s, seat in judged]
        judge = (
            self.dataset_judges.get(prompt.dataset, self.judge)
            if prompt.purpose is Purpose.EVALUATE
            else self.judge
        )
        with tracing.span("reward", samples=len(inputs)):
            outcomes = await judge(inputs) if judge and inputs else [(0.0, {})] * len(inputs)
        for (sample, seat), reward_input, outcome in zip(judged, inputs, outcomes, strict=True):
            if isinstance(outcome, RewardError):
                row = f"{prompt.dataset} row {prompt.row}"
                failure_log.LOG.note(
                    "a reward failed", str(outcome), outcome.details, at=row, index=sample.index
                )
                sample.fail(f"reward: {outcome}\n{row}")
            elif sample.status is not SampleStatus.FAILED:  # the reward of another seat may have
                seat_rewards.give(sample, seat, self._with_terms(outcome, reward_input, prompt))
        for sample in finished:
            if sample.status is not SampleStatus.FAILED:
                seat_rewards.settle(sample)
        await gather(*(self.hooks.after_reward(prompt, sample) for sample in samples))

    def _reward(self, prompt: Prompt) -> Reward | None:
        dataset = evaluation_dataset(self.spec, prompt)
        return dataset.reward if dataset and dataset.reward else self.spec.reward

    def _with_terms(
        self, judgement: Judgement, reward_input: RewardInput, prompt: Prompt
    ) -> Judgement:
        """Add `reward.terms` to a training reward."""
        reward = self.spec.reward
        if prompt.purpose is Purpose.EVALUATE or reward is None or not reward.terms:
            return judgement
        return with_terms(judgement, reward_input, reward.terms, reward.key)
