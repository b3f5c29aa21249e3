"""Sequences of tokens to train on, and how they are packed into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from sluice.samples.sample import Experts, Float32, Int32, Sample, UInt8
from sluice_trainer.batch.images import ExpandedSample, PlacedImage


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt and its response.

    Attributes
    ----------
    tokens
        [prompt + response] int32. Empty if generation failed.
    response_length
        Tokens of the response.
    experts
        As `Sample.routed_experts`, or with `routingReplay: trainer` the experts to which this
        process's mixtures sent the tokens.
    images
        Images among the tokens, in their order.

    """

    tokens: Int32
    response_length: int
    experts: Experts | None = field(default=None, kw_only=True)
    images: tuple[PlacedImage, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.response_length and not 0 < self.response_length < len(self.tokens):
            raise ValueError(
                f"a response of {self.response_length} tokens in a sequence of {len(self.tokens)}: "
                "at least one prompt token must precede it"
            )


_PER_TOKEN = (
    "loss_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "returns",
    "advantage",
    "on_policy_mask",
)


@dataclass(frozen=True, slots=True)
class TrainSequence(Sequence):
    """A sequence to train on.

    Attributes
    ----------
    loss_mask
        [response], 1 at tokens that are trained.
    rollout_log_probs
        [response], log-probs under the engine that sampled the tokens.
    advantage
        [response], or one number for all response tokens. With a loss of preferences the margin of
        the pair, or 1 for a desirable answer and 0 for another one.
    group_id, index, branch
        Group of the sample, index of the sample in its group, and index of this sequence in the
        sample.
    seat
        Seat that this sequence belongs to (`rollout.seats`).
    trained_elsewhere
        Trained tokens in the other sequences of the sample.
    old_log_probs
        [response], log-probs under the weights at the start of the batch; None: they are the
        weights that the optimizer step starts from.
    ref_log_probs
        [response], log-probs under the reference; only with a KL loss.
    teacher_log_probs
        [response], log-probs under the teacher; only with distillation.
    values, returns
        [response], the critic's values before the step, and its targets; only with a critic.
    on_policy_mask
        [response], 1 at tokens that the weights before the step sampled; None: 0 everywhere.

    """

    loss_mask: UInt8
    rollout_log_probs: Float32
    advantage: float | Float32
    group_id: int = 0
    index: int = 0
    branch: int = 0
    seat: str = ""
    trained_elsewhere: int = 0
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    on_policy_mask: UInt8 | None = None

    @classmethod
    def from_sample(
        cls,
        group_id: int,
        sample: Sample,
        advantage: float | Float32,
        version: int | None = None,
        *,
        routed: bool = True,
    ) -> list[TrainSequence]:
        """Return the sequences of a sample from the buffer.

        Parameters
        ----------
        group_id
            Group of the sample.
        sample
            The sample.
        advantage
            Advantage of all sequences.
        version
            Version of the weights that the step starts from.
        routed
            Keep the experts that the engine reported, if any.

        """
        sequences = sample.sequences
        placed = sample.placed if isinstance(sample, ExpandedSample) else [()] * len(sequences)
        return [
            cls(
                tokens=sequence.tokens,
                response_length=sequence.response_length,
                loss_mask=sequence.loss_mask,
                rollout_log_probs=sequence.rollout_log_probs,
                advantage=advantage,
                group_id=group_id,
                index=sample.index,
                branch=branch,
                seat=sequence.seat,
                trained_elsewhere=sample.trainable_tokens - int(sequence.loss_mask.sum()),
                experts=sequence.routed_experts if routed else None,
                images=placed[branch],
                on_policy_mask=None if version is None else sequence.sampled_by(version),
            )
            for branch, sequence in enumerate(sequences)
        ]

    def at_end(self) -> TrainSequence:
        """Return the sequence with a response of one token more, whose value a reward model reads.

        Values are read at the position before a token, so this is the value at the last token.
        """
        return replace(
            self,
            tokens=np.append(self.tokens, np.int32(0)),
            response_length=1,
            loss_mask=np.ones(1, np.uint8),
            rollout_log_probs=np.zeros(1, np.float32),
        )

    def __post_init__(self) -> None:
        Sequence.__post_init__(self)
        for name in _PER_TOKEN:
            value = getattr(self, name)
            if value is not None and np.ndim(value) and len(value) != self.response_length:
                raise ValueError(
                    f"group {self.group_id} sample {self.index}: {name} has {len(value)} entries "
                    f"for {self.response_length} response tokens"
                )


def pack(lengths: Seq[int], max_tokens: int) -> list[list[int]]:
    """Pack sequences into micro-batches of at most `max_tokens` tokens.

    First-fit decreasing (Johnson 1973), deterministic. A sequence longer than the limit gets a
    micro-batch alone.

    Parameters
    ----------
    lengths
        Tokens of each sequence.
    max_tokens
        Upper limit of the sum of lengths in a micro-batch.

    Returns
    -------
    Ascending indices into `lengths` for each micro-batch, every index exactly once.

    """
    bins: list[list[int]] = []
    free_tokens: list[int] = []
    # Longest first; equal lengths in their order, so that all ranks pack alike.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((b for b, free in enumerate(free_tokens) if lengths[index] <= free), None)
        if fits is None:
            bins.append([])
            free_tokens.append(max_tokens)
            fits = len(bins) - 1
        bins[fits].append(index)
        free_tokens[fits] -= lengths[index]
    return [sorted(members) for members in bins]


def micro_batch_members(
    shard: Seq[Sequence],
    max_tokens: int,
    count: Callable[[int], int],
    *,
    whole_samples: bool = False,
) -> list[list[int]]:
    """Pack this rank's sequences into as many micro-batches as all data-parallel ranks run.

    Parameters
    ----------
    shard
        Sequences of this rank.
    max_tokens
        Upper limit of the tokens of a micro-batch.
    count
        Returns the number of micro-batches to run, given how many this rank needs. Collective.
    whole_samples
        Keep the sequences of a sample in one micro-batch. They stand next to one another in
        `shard`, which holds `TrainSequence`s.

    Returns
    -------
    Ascending indices into `shard` for each micro-batch.

    """
    units = samples_of(shard) if whole_samples else [[index] for index in range(len(shard))]
    bins = pack([sum(len(shard[i].tokens) for i in unit) for unit in units], max_tokens)
    bins = equalise(bins, count(len(bins)))
    return [[i for unit in members for i in units[unit]] for members in bins]


def samples_of(shard: Seq[Sequence]) -> list[list[int]]:
    """Return the indices of the sequences of each sample."""
    samples: dict[tuple[int, int], list[int]] = {}
    for index, sequence in enumerate(shard):
        assert isinstance(sequence, TrainSequence)
        samples.setdefault((sequence.group_id, sequence.index), []).append(index)
    return list(samples.values())


def equalise(bins: list[list[int]], count: int) -> list[list[int]]:
    """Split micro-batches until there are `count`; all data-parallel ranks must run equally many.

    The largest are halved while they hold several sequences. Then empty ones are added, which run
    as one token of weight 0.

    Raises
    ------
    ValueError
        There are more than `count` micro-batches.

    """
    if len(bins) > count:
        raise ValueError(f"{len(bins)} micro-batches cannot become {count}")
    result = [list(members) for members in bins]
    while len(result) < count:
        largest = max(range(len(result)), key=lambda b: len(result[b]), default=None)
        # A micro-batch of one sequence cannot be halved.
        if largest is None or len(result[largest]) < 2:
            result.append([])
            continue
        members = result[largest]
        result[largest], half = members[: len(members) // 2], members[len(members) // 2 :]
        result.append(half)
    return result
