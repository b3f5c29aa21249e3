"""One prompt group: its samples generated side by side, continued where an earlier lease left them, and scored."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from sluice.api import EvaluationDataset, RLJobSpec
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judge import Judge
from sluice.sample import BASELINE_REWARD, Prompt, Purpose, Sample, SampleGroup, SampleStatus
from sluice.telemetry import logs
from sluice.wire.membership import Membership
from sluice_rollout.generate import Generator, sampling_params
from sluice_rollout.prompts import PromptEncoder, PromptTooLongError


@dataclass(slots=True)
class GroupMaker:
    """Makes groups; counts what it has made."""

    spec: RLJobSpec
    encoder: PromptEncoder
    generator: Generator
    judge: Judge
    membership: Membership
    last_progress: float = field(default_factory=time.monotonic)
    finished_samples: int = 0
    generated_tokens: int = 0

    async def __call__(self, prompt: Prompt, partial: list[Sample]) -> SampleGroup:
        """The group: finished and scored, or, after a drain, with samples that are not."""
        dataset = self._dataset(prompt)
        count = self.spec.rollout.samples_per_prompt
        if dataset is not None and self.spec.evaluation is not None:
            count = dataset.samples_per_prompt or self.spec.evaluation.samples_per_prompt
        group = SampleGroup(prompt, self._continued(partial, prompt, count))
        try:
            ids = self.encoder.encode(prompt)
        except PromptTooLongError as error:
            for sample in group.samples:
                sample.fail(str(error))
            return group
        params = self._sampling(dataset)
        greedy = self._greedy(ids, params, prompt)
        _, baseline = await asyncio.gather(
            asyncio.gather(*(self._sample(ids, sample, params, prompt) for sample in group.samples)), greedy
        )
        if baseline is not None:
            note_baseline(group, baseline)
        if self.spec.reward.group and all(sample.status.finished for sample in group.samples):
            await self._score(group.samples, prompt)
        return group

    async def _sample(self, ids: list[int], sample: Sample, params: dict[str, Any], prompt: Prompt) -> None:
        if sample.status.finished and (sample.reward is not None or self.spec.reward.group):
            return
        before = sample.response_length
        await self.generator(ids, sample, params)
        self.generated_tokens += sample.response_length - before
        self.last_progress = time.monotonic()
        if sample.status.finished:
            self.finished_samples += 1
            if not self.spec.reward.group:
                await self._score([sample], prompt)

    async def _greedy(self, ids: list[int], params: dict[str, Any], prompt: Prompt) -> Sample | None:
        """The greedy response that remax compares a prompt's samples with: scored, but none of the group's samples."""
        if self.spec.algorithm.estimator != "remax" or prompt.purpose is not Purpose.TRAIN:
            return None
        sample = Sample(index=-1, metadata={"baseline": True})
        await self.generator(ids, sample, params | {"temperature": 0.0})
        await self._score([sample], prompt)
        return sample

    def _continued(self, partial: list[Sample], prompt: Prompt, count: int) -> list[Sample]:
        """The group's samples: those returned by an earlier lease go on where they stopped, if the weights allow it."""
        given = {sample.index: sample for sample in partial}
        return [
            given[i] if i in given and self._may_continue(given[i], prompt) else Sample(index=i) for i in range(count)
        ]

    def _may_continue(self, sample: Sample, prompt: Prompt) -> bool:
        """Tokens of other weights may stay only where partial rollouts are wanted, never in an evaluation."""
        version = self.membership.latest.version if self.membership.latest else -1
        on_policy = all(span.version == version for span in sample.weight_versions)
        return on_policy or (self.spec.rollout.partial.enabled and prompt.purpose is Purpose.TRAIN)

    def _dataset(self, prompt: Prompt) -> EvaluationDataset | None:
        if prompt.purpose is Purpose.TRAIN or self.spec.evaluation is None:
            return None
        return next(d for d in self.spec.evaluation.datasets if d.source_name == prompt.dataset)

    def _sampling(self, dataset: EvaluationDataset | None) -> dict[str, Any]:
        base = self.spec.rollout.sampling
        if dataset is None or self.spec.evaluation is None:
            return sampling_params(base)
        merged = self.spec.evaluation.sampling.model_dump(exclude_none=True)
        merged |= dataset.sampling.model_dump(exclude_none=True) if dataset.sampling else {}
        return sampling_params(base, type(self.spec.evaluation.sampling).model_validate(merged))

    async def _score(self, samples: list[Sample], prompt: Prompt) -> None:
        """Set rewards. A reward that cannot be had fails its sample with the reason."""
        judged = [s for s in samples if s.status.finished and s.status is not SampleStatus.FAILED]
        inputs = [
            RewardInput(
                prompt=prompt.prompt,
                response=s.response,
                label=prompt.label,
                metadata=prompt.metadata | s.metadata,
                tokens=s.tokens.tolist(),
                response_length=s.response_length,
                truncated=s.status is SampleStatus.TRUNCATED,
            )
            for s in judged
        ]
        for sample, outcome in zip(judged, await self.judge(inputs), strict=True):
            if isinstance(outcome, RewardError):
                error = f"{prompt.dataset} row {prompt.row}: {outcome}"
                logs.get().warning("reward failed", group=prompt.group_id, index=sample.index, error=error)
                sample.fail(error)
            else:
                sample.reward, sample.reward_parts = outcome


def note_baseline(group: SampleGroup, greedy: Sample) -> None:
    """Write the reward of the greedy response into each sample's metadata.

    Without it the group is worth nothing: it fails with the greedy response, and where that was cut off by a drain the
    group is not finished either, so one sample is made again, beside a new greedy response, under the next lease.
    """
    if greedy.status is SampleStatus.FAILED:
        for sample in group.samples:
            sample.fail(f"the greedy response that remax compares with failed: {greedy.error}")
    elif not greedy.status.finished:
        group.samples[-1] = Sample(index=group.samples[-1].index)
    else:
        for sample in group.samples:
            sample.metadata[BASELINE_REWARD] = greedy.reward


def mask_off_policy(sample: Sample) -> None:
    """Train only on tokens of the newest weights that a sample has seen (slime: mask_offpolicy_in_partial_rollout)."""
    newest = max((span.version for span in sample.weight_versions), default=0)
    mask = sample.loss_mask.copy()
    for span in sample.weight_versions:
        if span.version < newest:
            mask[span.start : span.end] = 0
    sample.loss_mask = mask
