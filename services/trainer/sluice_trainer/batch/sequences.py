"""Sequences as a trainer sees them, and which of them go into one micro-batch. Nothing here belongs
to a backend.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from sluice.samples.sample import Experts, Float32, Int32, Sample, UInt8


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt and its response. tokens: [prompt + response] int32. Both may be empty where
    generation failed. experts: as `Sample.routed_experts`; or where this trainer process' own
    mixtures sent the tokens (`routingReplay: trainer`).
    """

    tokens: Int32
    response_length: int
    experts: Experts | None = field(default=None, kw_only=True)

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
    "fresh",
)


@dataclass(frozen=True, slots=True)
class TrainSequence(Sequence):
    """A sequence to train on.

    loss_mask, rollout_log_probs: [response]. advantage: one number for all response tokens, or one
    each. old_log_probs: [response], of the weights at the start of the batch; None: those that the
    step starts from. ref_log_probs: [response]; only with a KL loss. teacher_log_probs: [response];
    only in a distillation. values, returns: [response]; only with a critic: its values before the
    step, and what it learns. fresh: [response], 1 where the weights that the step starts from
    sampled the token; None: nowhere. group_id and index say which sample it is of, branch which of
    its sequences, and seat whose (`rollout.seats`). trained_elsewhere: tokens that the sample's
    other sequences train.
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
    fresh: UInt8 | None = None

    @classmethod
    def of(
        cls,
        group_id: int,
        sample: Sample,
        advantage: float | Float32,
        version: int | None = None,
        *,
        routed: bool = True,
    ) -> list[TrainSequence]:
        """The sequences of a sample from the buffer. version: of the weights that the step starts
        from. routed: with the experts that an engine told, where it has told any.
        """
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
                fresh=None if version is None else sequence.sampled_by(version),
            )
            for branch, sequence in enumerate(sample.sequences)
        ]

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
    """Micro-batches of at most `max_tokens` tokens: first fit, longest first. Deterministic.

    Returns indices into `lengths`; each occurs exactly once, ascending within a micro-batch. A
    sequence longer than `max_tokens` goes alone.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((b for b, free in enumerate(room) if lengths[index] <= free), None)
        if fits is None:
            bins.append([])
            room.append(max_tokens)
            fits = len(bins) - 1
        bins[fits].append(index)
        room[fits] -= lengths[index]
    return [sorted(members) for members in bins]


def equalise(bins: list[list[int]], count: int) -> list[list[int]]:
    """Exactly `count` micro-batches, because all data-parallel ranks must run the same number.

    The largest are halved as long as they hold several sequences; then empty ones are added, which
    run as one token of weight 0.
    """
    if len(bins) > count:
        raise ValueError(f"{len(bins)} micro-batches cannot become {count}")
    result = [list(members) for members in bins]
    while len(result) < count:
        largest = max(range(len(result)), key=lambda b: len(result[b]), default=None)
        if largest is None or len(result[largest]) < 2:
            result.append([])
            continue
        members = result[largest]
        result[largest], half = members[: len(members) // 2], members[len(members) // 2 :]
        result.append(half)
    return result
