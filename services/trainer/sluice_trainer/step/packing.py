"""The tensors of a packed row of sequences."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sluice_trainer.algorithms.aggregation import (
    Aggregation,
    BatchTotals,
    metric_aggregation,
    token_weights,
)
from sluice_trainer.algorithms.objective import LossInputs
from sluice_trainer.batch.sequences import Sequence, TrainSequence


class RowLayout(Protocol):
    """Where sequences lie in a row, as a backend's attention wants to know it.

    positions: [t] int64, each token's place in its sequence; lengths: of the sequences.
    """

    positions: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed row, or this rank's share of it under context parallelism.

    tokens: [t] int64, all sequences end to end, without each one's last token (it predicts nothing
    that is asked for). packing: the backend's `RowLayout`. predicting: [r] int64, the places
    in the row that predict the response tokens; targets: [r] int64, those tokens; sequence: [r]
    int64, which member each belongs to. members: the sequences' indices; response_lengths: theirs.
    loss: what the objective needs besides, [r]; None outside training.
    own: [s] int64, which of the r response tokens this rank's share predicts; None: all. With it,
    `tokens`, `predicting` and `targets` are the share's; everything that is [r] still is of the
    whole row.
    taught: a teacher's hidden states at `predicting`, in host memory; None: no divergence over the
    whole vocabulary.
    experts: [t, layers x experts of a token] int16, where the tokens are to go; -1: not known.
    """

    tokens: Tensor
    packing: Any
    predicting: Tensor
    targets: Tensor
    sequence: Tensor
    members: tuple[int, ...]
    response_lengths: tuple[int, ...]
    loss: LossInputs | None = None
    own: Tensor | None = None
    taught: Tensor | None = None
    experts: Tensor | None = None

    def split(self, values: Tensor) -> list[Tensor]:
        """[r] values per member."""
        return list(torch.split(values, list(self.response_lengths)))


Forward = Callable[[Any, MicroBatch], Tensor]
"""(model, micro-batch) -> [k, r] numbers of the response tokens; of Megatron on its last pipeline
stage, hidden states before it."""


def packed_row(
    shard: Seq[Sequence],
    members: Seq[int],
    device: torch.device,
    packing: Callable[[list[int]], RowLayout],
    *,
    multiple: int = 1,
) -> MicroBatch:
    """The packed row of these members of the shard.

    An empty one gets a token that predicts nothing.

    packing: of sequences of these lengths. The row is filled up by a sequence of its own to a
    length that `multiple` divides evenly.
    """
    chosen = [shard[i] for i in members]
    nothing = np.zeros(1, np.int32)
    rows = [s.tokens[:-1] if len(s.tokens) > 1 else nothing for s in chosen] or [nothing]
    if fill := -sum(len(row) for row in rows) % multiple:
        rows.append(np.zeros(fill, np.int32))
    lengths = [len(row) for row in rows]
    ends = np.cumsum(lengths)
    responses = [s.response_length for s in chosen]
    predicting = [np.arange(end - n, end) for end, n in zip(ends, responses, strict=False)]
    targets = [s.tokens[len(s.tokens) - s.response_length :] for s in chosen]
    return MicroBatch(
        tokens=_index(rows, device),
        packing=packing(lengths),
        predicting=_index(predicting, device),
        targets=_index(targets, device),
        sequence=_index([np.full(n, i) for i, n in enumerate(responses)], device),
        members=tuple(members),
        response_lengths=tuple(responses),
        experts=_experts(chosen, lengths, device),
    )


def _experts(chosen: Seq[Sequence], lengths: list[int], device: torch.device) -> Tensor | None:
    """Of a row whose sequences, and what fills it up, have these lengths."""
    known = [(i, s.experts) for i, s in enumerate(chosen) if s.experts is not None]
    if not known:
        return None
    if len(widths := {experts.shape[1] for _, experts in known}) > 1:
        raise ValueError(f"experts of a token in one step: {sorted(widths)} numbers")
    row = np.full((sum(lengths), widths.pop()), -1, np.int16)
    starts = np.cumsum([0, *lengths])
    for i, experts in known:
        row[starts[i] : starts[i] + len(experts)] = experts
    return torch.from_numpy(row).to(device)


def with_loss(
    batch: MicroBatch,
    shard: Seq[TrainSequence],
    totals: BatchTotals,
    aggregation: Aggregation,
    device: torch.device,
) -> MicroBatch:
    """The packed row with what the loss needs. totals: of the optimizer step over all ranks."""
    chosen = [shard[i] for i in batch.members]
    mask = _values([s.loss_mask for s in chosen], device)
    metric = metric_aggregation(aggregation)
    places = [s.group_id for s in chosen], [s.trained_elsewhere for s in chosen]
    advantages = [np.broadcast_to(np.float32(s.advantage), s.response_length) for s in chosen]
    fresh = [np.zeros(s.response_length) if s.fresh is None else s.fresh for s in chosen]
    rollout = _values([s.rollout_log_probs for s in chosen], device)
    loss = LossInputs(
        advantages=_values(advantages, device),
        loss_weights=token_weights(mask, batch.sequence, totals, aggregation, *places),
        metric_weights=token_weights(mask, batch.sequence, totals, metric, *places),
        # A masked token's log-prob means nothing and may be anything, but 0 x inf is nan.
        rollout_log_probs=torch.where(mask > 0, rollout, 0.0),
        sequence=batch.sequence,
        old_log_probs=_optional([s.old_log_probs for s in chosen], device),
        ref_log_probs=_optional([s.ref_log_probs for s in chosen], device),
        teacher_log_probs=_optional([s.teacher_log_probs for s in chosen], device),
        values=_optional([s.values for s in chosen], device),
        returns=_optional([s.returns for s in chosen], device),
        fresh=_values(fresh, device),
    )
    return replace(batch, loss=loss)


def _index(parts: Seq[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    joined = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
    return torch.from_numpy(joined).to(device)


def _values(parts: Seq[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    joined = np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
    return torch.from_numpy(joined).to(device)


def _optional(parts: Seq[Tensor | None], device: torch.device) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if parts and not present:
        return None
    if len(present) != len(parts):
        raise ValueError("either all sequences of a micro-batch have these numbers or none")
    return torch.cat([torch.empty(0), *present]).to(device, torch.float32)
