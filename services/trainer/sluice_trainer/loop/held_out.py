"""Held-out rows with given answers (`evaluation.heldOut`), whose loss the trainer computes.

Rank 0 fetches the rows from the buffer once, a page at a time; each rank keeps its share of every
page, with the log-probs of the reference, which never change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sluice.api.groups.data import Evaluation
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Sample, SampleGroup, SampleStatus
from sluice.telemetry import logs
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.algorithms.preference import with_means_by_label
from sluice_trainer.algorithms.sft import with_perplexity
from sluice_trainer.backend import Backend
from sluice_trainer.batch.preparation import given_answers
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.clients.buffer_client import BufferClient
from sluice_trainer.telemetry.recorder import Recorder

# Rows left out that the log names for each data set.
SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Dataset:
    """Sequences of this rank in a data set, by page, and the totals of all ranks."""

    name: str
    pages: list[list[TrainSequence]]
    totals: BatchTotals


@dataclass(slots=True)
class HeldOut:
    """The data sets of `evaluation.heldOut`. All calls are collective.

    `recorder` is None on ranks other than 0.
    """

    policy: Backend
    buffer: BufferClient
    recorder: Recorder | None
    settings: Evaluation
    _datasets: list[_Dataset] = field(default_factory=list)

    @classmethod
    def of_job(
        cls, policy: Backend, buffer: BufferClient, recorder: Recorder | None
    ) -> HeldOut | None:
        """Return the held-out rows of the policy's job; None if there are none."""
        evaluation = policy.spec.evaluation
        if evaluation is None or not evaluation.held_out:
            return None
        return cls(policy, buffer, recorder, evaluation)

    def due(self, step: int, total_steps: int) -> bool:
        """Return whether the rows are measured after a step."""
        if step == 0:
            return self.settings.before_train
        return step % self.settings.every_steps == 0 or step == total_steps

    def measure(self, step: int) -> None:
        """Compute and record the metrics of each data set with the weights after `step`."""
        if not self._datasets:
            sources = enumerate(self.settings.held_out)
            self._datasets = [self._load(i, source.source_name) for i, source in sources]
        for dataset in self._datasets:
            sums: Counter[str] = Counter()
            for page in dataset.pages:
                sums.update(self.policy.measure(page, dataset.totals))
            metrics = with_perplexity(with_means_by_label(dict(sums)))
            if self.recorder:
                self.recorder.held_out(dataset.name, step, metrics)
                shown = {name: f"{value:.4g}" for name, value in metrics.items()}
                logs.get().info(f"held-out rows {dataset.name}, step {step}", **shown)

    def _load(self, number: int, name: str) -> _Dataset:
        """Fetch a data set. Raises ConfigurationError if no row of it can be used."""
        ranks = self.policy.ranks
        pages, failed = list[list[TrainSequence]](), list[str]()
        tokens: dict[int, int] = {}  # of each row, by its group id
        read = 0
        while page := self._page(number, read):
            read += len(page)
            usable = []
            for group in page:
                if group.samples[0].status is SampleStatus.FAILED:
                    failed.append(group.samples[0].error)
                else:
                    usable.append(group)
            if not usable:
                continue
            tokens |= {
                g.group_id: _trained_tokens(g.samples[0], self._counts_branches) for g in usable
            }
            share = usable[ranks.data_parallel_rank :: ranks.data_parallel_size]
            answers = given_answers(share, self.policy.spec.algorithm)
            pages.append(self.policy.with_reference(answers))
        if not tokens:
            raise ConfigurationError(
                f"spec.evaluation.heldOut[{number}]: no row of {name} can be used; the last: "
                f"{failed[-1]}"
            )
        if ranks.rank == 0:
            for why in failed[:SHOWN]:
                logs.get().warning("held-out row left out", error=why)
            logs.get().info(f"held-out rows {name}: {len(tokens)} used, {len(failed)} left out")
        longest = self.policy.spec.rollout.sampling.max_response_tokens
        totals = BatchTotals(len(tokens), sum(tokens.values()), longest, tokens)
        return _Dataset(name, pages, totals)

    def _page(self, dataset: int, first: int) -> list[SampleGroup]:
        """Return rows on all ranks, none after the last one."""
        ranks = self.policy.ranks
        page: list[SampleGroup] = ranks.broadcast(
            self.buffer.held_out(dataset, first) if ranks.rank == 0 else []
        )
        return page

    @property
    def _counts_branches(self) -> bool:
        """False if branches only serve to estimate a KL, as with kto."""
        return self.policy.spec.algorithm.paired


def _trained_tokens(sample: Sample, branches: bool) -> int:
    sequences = sample.sequences if branches else sample.sequences[:1]
    return sum(int(sequence.loss_mask.sum()) for sequence in sequences)
