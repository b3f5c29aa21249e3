"""Makes a prompt group: generates samples concurrently, continues unfinished ones, scores them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.api import EvaluationDataset, RLJobSpec
from sluice.data.chat import PromptError
from sluice.images.image import Image
from sluice.input_checks import InputError
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
from sluice.telemetry import failure_log, logs
from sluice.wire.image_client import ImageClient
from sluice.wire.membership import Membership
from sluice_rollout.episode import Episode, Play
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.gateway.images import ImageGate
from sluice_rollout.generate import REQUESTS, Generator, images_of_group, sampling_params
from sluice_rollout.load import GROUP_LOAD
from sluice_rollout.prompts import PromptEncoder, PromptTooLongError, evaluation_dataset
from sluice_rollout.scoring.scorer import Scorer
from sluice_rollout.scoring.teacher import Teachers
from sluice_rollout.user_functions.loading import UserCode
from sluice_rollout.user_functions.runner import EpisodeRunner

# Refused prompts of a source that one worker's log names. The buffer counts them all.
LOGGED_REFUSALS = 10


@dataclass(slots=True)
class GroupMaker:
    """Makes the groups of one worker, and counts what it has generated."""

    spec: RLJobSpec
    encoder: PromptEncoder
    generator: Generator
    scorer: Scorer
    membership: Membership
    # Runs the job's function or program; None: the model's answer is the sample.
    runner: EpisodeRunner | None = None
    # Runners of prompts whose data source names a function, by purpose and source.
    source_runners: Mapping[tuple[Purpose, str], EpisodeRunner | None] = field(default_factory=dict)
    teacher: Teachers | None = None
    # Fetches the images of prompts; None if the job has none.
    image_client: ImageClient | None = None
    finished_samples: int = 0
    generated_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    async def make(self, prompt: Prompt, partial: list[Sample]) -> SampleGroup:
        """Generate and score the group of a prompt.

        Parameters
        ----------
        prompt
            The prompt, as it was leased.
        partial
            Samples that an earlier lease has left unfinished.

        Returns
        -------
        The group: finished and scored, or with unfinished samples if the worker drains.

        """
        dataset = evaluation_dataset(self.spec, prompt)
        count = self.spec.rollout.samples_per_prompt
        if dataset is not None and self.spec.evaluation is not None:
            count = self.spec.evaluation.samples_of(dataset)
        GROUP_LOAD.get().expect(count)
        group = SampleGroup(prompt, self._continue(partial, prompt, count))
        images = await self._images(prompt)
        try:
            ids = self.encoder.encode(prompt, images)
        except PromptError as error:
            self._refuse(group, error)
            return group
        params = self._sampling(dataset)
        _, baseline = await gather(
            self._generate_and_score_all(ids, group.samples, params, prompt),
            self._greedy_baseline(ids, params, prompt),
        )
        if baseline is not None:
            note_baseline(group, baseline)
        if self.scorer.judges_groups(prompt):
            if not all(sample.status.finished for sample in group.samples):
                # The worker drains. All samples are judged together after the next lease.
                return group
            await self.scorer.score(group.samples, prompt)
        for sample in group.samples:
            if sample.status.finished:
                self._check(sample, prompt, ids)
        return group

    # --- before generation

    async def _images(self, prompt: Prompt) -> list[Image]:
        """Return the prompt's images, which all requests of its group share."""
        if self.image_client is None or not prompt.images:
            return []
        images = await self.image_client.get(prompt.images)
        REQUESTS.get().images = dict(zip(prompt.images, images, strict=True))
        return images

    async def _images_of_agents(self, samples: list[Sample]) -> dict[str, Image]:
        """Return those images of samples that their prompt does not have."""
        of_prompt = REQUESTS.get().images
        used = {name for s in samples for sequence in s.sequences for name in sequence.images}
        names = sorted(used - of_prompt.keys())
        if self.image_client is None or not names:
            return {}
        return dict(zip(names, await self.image_client.get(names), strict=True))

    def _continue(self, partial: list[Sample], prompt: Prompt, count: int) -> list[Sample]:
        """Return the group's samples: continued ones if the weights allow it, else new ones."""
        returned = {sample.index: sample for sample in partial}
        return [
            returned[i]
            if i in returned and self._may_continue(returned[i], prompt)
            else Sample(index=i)
            for i in range(count)
        ]

    def _may_continue(self, sample: Sample, prompt: Prompt) -> bool:
        """Return True if tokens of older weights may stay: in training with partial rollouts."""
        on_policy = sample.versions <= {self.membership.version}
        return on_policy or (self.spec.rollout.partial.enabled and prompt.purpose is Purpose.TRAIN)

    def _refuse(self, group: SampleGroup, error: PromptError) -> None:
        """Fail all samples of a prompt that cannot be encoded.

        A prompt that is too long is filtered and counted; any other error is a failure.
        """
        for sample in group.samples:
            sample.fail(str(error))
        self.refused[group.prompt.dataset] += 1
        if isinstance(error, PromptTooLongError):
            group.samples[0].metadata["filtered"] = PROMPT_TOO_LONG
        if self.refused[group.prompt.dataset] <= LOGGED_REFUSALS:
            logs.get().warning("prompt left out", error=str(error))

    def _sampling(self, dataset: EvaluationDataset | None) -> dict[str, Any]:
        base = self.spec.rollout.sampling
        if dataset is None or self.spec.evaluation is None:
            return sampling_params(base)
        merged = self.spec.evaluation.sampling.model_dump(exclude_none=True)
        merged |= dataset.sampling.model_dump(exclude_none=True) if dataset.sampling else {}
        return sampling_params(base, type(self.spec.evaluation.sampling).model_validate(merged))

    # --- generation

    async def _generate_and_score_all(
        self, ids: list[int], samples: list[Sample], params: dict[str, Any], prompt: Prompt
    ) -> None:
        """Make samples one by one, or in one call if the user's function takes whole groups."""
        runner = self._runner(prompt)
        parts = [samples] if runner and runner.whole_group else [[sample] for sample in samples]
        await gather(*(self._generate_and_score(ids, part, params, prompt) for part in parts))

    async def _generate_and_score(
        self, ids: list[int], samples: list[Sample], params: dict[str, Any], prompt: Prompt
    ) -> None:
        load = GROUP_LOAD.get()
        if all(self._is_complete(sample, prompt) for sample in samples):
            load.done(len(samples))
            return
        before = sum(map(_response_tokens, samples))
        await self._generate(ids, samples, params, prompt)
        # Not after an error, which ends the whole group: if the engine is lost, this worker must
        # not lease more groups for its free places.
        load.done(len(samples))
        self.generated_tokens += max(0, sum(map(_response_tokens, samples)) - before)
        finished = [sample for sample in samples if sample.status.finished]
        self.finished_samples += len(finished)
        if self.teacher and self._has_teacher(prompt):
            valid = [sample for sample in finished if sample.status is not SampleStatus.FAILED]
            with REQUESTS.get().holding(await self._images_of_agents(valid)):
                await gather(*(self.teacher(prompt, sample) for sample in valid))
        if not self.scorer.judges_groups(prompt):
            await self.scorer.score(finished, prompt)

    def _is_complete(self, sample: Sample, prompt: Prompt) -> bool:
        """Return True if an earlier lease has finished the sample and all scores of it alone."""
        taught = sample.teacher_log_probs is not None or not self._has_teacher(prompt)
        return (
            sample.status.finished
            and taught
            and (sample.reward is not None or self.scorer.judges_groups(prompt))
        )

    async def _generate(
        self, ids: list[int], samples: list[Sample], params: dict[str, Any], prompt: Prompt
    ) -> None:
        """Generate with the user's function if there is one, else as one answer of the model."""
        if prompt.images:
            image_tokens = self.encoder.image_tokens(images_of_group(prompt.images))
            for sample in samples:
                if not len(sample.tokens):
                    sample.images, sample.image_tokens = list(prompt.images), image_tokens
        runner = self._runner(prompt)
        if runner is None:
            await gather(*(self.generator(ids, sample, params) for sample in samples))
        elif runner.whole_group:
            await runner.run_group(prompt, ids, samples, params)
        else:
            await gather(*(runner(prompt, ids, sample, params) for sample in samples))

    def _runner(self, prompt: Prompt) -> EpisodeRunner | None:
        return self.source_runners.get((prompt.purpose, prompt.dataset), self.runner)

    def _has_teacher(self, prompt: Prompt) -> bool:
        return self.teacher is not None and prompt.purpose is Purpose.TRAIN

    async def _greedy_baseline(
        self, ids: list[int], params: dict[str, Any], prompt: Prompt
    ) -> Sample | None:
        """Generate and score the greedy response that remax compares with; None: not needed."""
        if not self.spec.algorithm.kind.greedy or prompt.purpose is not Purpose.TRAIN:
            return None
        sample = Sample(index=-1, metadata={"baseline": True})
        await self._generate(ids, [sample], params | {"temperature": 0.0}, prompt)
        await self.scorer.score([sample], prompt)
        return sample

    # --- after generation

    def _check(self, sample: Sample, prompt: Prompt, ids: list[int]) -> None:
        """Fail a finished sample that is not valid: the buffer would refuse its whole group."""
        try:
            sample.check()
            sample.check_vocabulary(self.encoder.embedding)
            if self.image_client is not None and sample.status is not SampleStatus.FAILED:
                self._check_images(sample)
            check_turns(sample.metadata, len(sample.sequences), "metadata")
        except (SampleError, InputError) as error:
            line = f"a broken sample: {error}"
            row = f"{prompt.dataset} row {prompt.row}"
            failure_log.LOG.note("a sample is broken", line, at=row, index=sample.index)
            sample.fail(f"{line}\n{row}")
            sample.cut(0)
            sample.metadata, sample.response, sample.reward_parts = {}, "", {}
        if self.image_client is not None and sample.status is SampleStatus.FAILED:
            self._fit_images(sample, prompt, ids)

    def _fit_images(self, sample: Sample, prompt: Prompt, ids: list[int]) -> None:
        """Give a failed sample its prompt's tokens if its own have no places for its images.

        The trainer sees its tokens too.
        """
        try:
            self._check_images(sample)
        except SampleError:
            images = list(prompt.images)
            added = self.encoder.image_tokens(images_of_group(images))
            whole = Sample(index=sample.index, images=images, image_tokens=added)
            whole.append_prompt(ids)
            sample.take(whole)

    def _check_images(self, sample: Sample) -> None:
        """Raise SampleError unless each sequence has a placeholder for each of its images.

        Tokens that the model has generated stand for no image.
        """
        placeholder = self.generator.placeholder
        for sequence in sample.sequences:
            start = sequence.prompt_length
            given = sequence.tokens[start:][sequence.loss_mask == 0]
            count = int((sequence.tokens[:start] == placeholder).sum())
            count += int((given == placeholder).sum())
            if count != len(sequence.images):
                raise SampleError(
                    f"samples[{sample.index}].images: {len(sequence.images)} images for {count} "
                    "placeholders in the tokens"
                )


def group_maker(
    spec: RLJobSpec,
    encoder: PromptEncoder,
    generator: Generator,
    membership: Membership,
    code: UserCode,
    teacher: Teachers | None = None,
    open_gateway: Callable[[Episode], Gateway] | None = None,
    image_client: ImageClient | None = None,
) -> GroupMaker:
    """Build the maker of a job's groups. `open_gateway` opens the gateway to an episode."""
    image_gate = ImageGate.for_job(spec, encoder, image_client)

    def runner(named: tuple[str, Play] | None) -> EpisodeRunner | None:
        if named is None:
            return None
        name, play = named
        key = spec.reward.key if spec.reward else None
        return EpisodeRunner(
            play, name, generator, encoder.tokenizer, spec.rollout.function_seconds,
            key, open_gateway, tuple(seat.name for seat in spec.rollout.seats), image_gate,
            spec.rollout.limits,
        )  # fmt: skip

    return GroupMaker(
        spec,
        encoder,
        generator,
        Scorer(spec, generator.text, code.judge, code.dataset_judges, code.hooks),
        membership,
        runner(code.functions.default),
        {source: runner(named) for source, named in code.functions.by_source.items()},
        teacher,
        image_client,
    )


def note_baseline(group: SampleGroup, greedy: Sample) -> None:
    """Write the reward of the greedy response into the metadata of each sample.

    If the greedy response failed, the group fails with it. If a drain cut it off, the group is not
    finished either: one sample is generated again with a new greedy response, after the next lease.
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
    """Count the tokens of a response; tokens that branches share count once."""
    return sample.response_length + sum(int(b.loss_mask.sum()) for b in sample.branches)
