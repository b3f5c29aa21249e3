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
    """The positions of sequences in a row, in the form that a backend's attention needs.

    Attributes
    ----------
    positions
        [t] int64, position of each token in its sequence.
    lengths
        Tokens of each sequence.

    """

    positions: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed row of t tokens and r response tokens, or a rank's share under context parallelism.

    Attributes
    ----------
    tokens
        [t] int64, all sequences end to end, each without its last token, whose prediction is not
        needed.
    packing
        The backend's `RowLayout`.
    predicting
        [r] int64, positions in the row that predict the response tokens.
    targets
        [r] int64, the response tokens.
    sequence
        [r] int64, index in `members` of the sequence of each response token.
    members
        Indices of the sequences in the shard.
    response_lengths
        Response tokens of each member.
    loss
        Inputs of the loss, [r] each; None outside training.
    local_positions
        [s] int64, which of the r response tokens this rank's share predicts; None: all. If set,
        `tokens`, `predicting` and `targets` are those of the share, and all other [r] tensors
        are those of the whole row.
    teacher_hidden
        A teacher's hidden states at `predicting`, in host memory; None unless the loss has a
        divergence over the whole vocabulary.
    experts
        [t, layers x experts of a token] int16, the experts to send each token to; -1: not known.
    rows
        A row for each member, if the model cannot compute several sequences in one. They are
        computed in place of the whole row.

    """

    tokens: Tensor
    packing: Any
    predicting: Tensor
    targets: Tensor
    sequence: Tensor
    members: tuple[int, ...]
    response_lengths: tuple[int, ...]
    loss: LossInputs | None = None
    local_positions: Tensor | None = None
    teacher_hidden: Tensor | None = None
    experts: Tensor | None = None
    rows: tuple[MicroBatch, ...] = ()

    def split(self, values: Tensor) -> list[Tensor]:
        """Split [r] values by member."""
        return list(torch.split(values, list(self.response_lengths)))


# (model, micro-batch) -> [k, r] numbers of the response tokens; with Megatron only on the last
# pipeline stage, on earlier stages hidden states.
Forward = Callable[[Any, MicroBatch], Tensor]


def packed_row(
    shard: Seq[Sequence],
    members: Seq[int],
    device: torch.device,
    packing: Callable[[list[int]], RowLayout],
    *,
    multiple: int = 1,
) -> MicroBatch:
    """Pack sequences into one row.

    A row without sequences, or an empty sequence, gets one token that predicts nothing.

    Parameters
    ----------
    shard
        Sequences of this rank.
    members
        Indices of the sequences to pack.
    device
        Device of the tensors.
    packing
        Returns the layout of a row of sequences with these lengths.
    multiple
        The length of the row is padded to a multiple of this, with one more sequence.

    """
    chosen = [shard[i] for i in members]
    empty = np.zeros(1, np.int32)
    rows = [s.tokens[:-1] if len(s.tokens) > 1 else empty for s in chosen] or [empty]
    if padding := -sum(len(row) for row in rows) % multiple:
        rows.append(np.zeros(padding, np.int32))
    lengths = [len(row) for row in rows]
    # The position before a token predicts it, so a response is predicted by the last n positions.
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


def share_of(batch: MicroBatch, held: Tensor) -> MicroBatch:
    """Return the part of a whole row that one of the ranks that share it computes.

    held: positions of its tokens, [share].
    """
    place = torch.full_like(batch.tokens, -1)
    place[held] = torch.arange(len(held), device=held.device)
    predicted = torch.nonzero(place[batch.predicting] >= 0).squeeze(-1)
    return replace(
        batch,
        tokens=batch.tokens[held],
        predicting=place[batch.predicting[predicted]],
        targets=batch.targets[predicted],
        local_positions=predicted,
        experts=None if batch.experts is None else batch.experts[held],
    )


def _experts(chosen: Seq[Sequence], lengths: list[int], device: torch.device) -> Tensor | None:
    """Return the experts of a row whose sequences and padding have these lengths."""
    recorded = [(i, s.experts) for i, s in enumerate(chosen) if s.experts is not None]
    if not recorded:
        return None
    if len(widths := {experts.shape[1] for _, experts in recorded}) > 1:
        raise ValueError(f"experts of a token in one step: {sorted(widths)} numbers")
    # -1 marks tokens whose experts are not known, such as padding.
    row = np.full((sum(lengths), widths.pop()), -1, np.int16)
    starts = np.cumsum([0, *lengths])
    for i, experts in recorded:
        row[starts[i] : starts[i] + len(experts)] = experts
    return torch.from_numpy(row).to(device)


def with_loss(
    batch: MicroBatch,
    shard: Seq[TrainSequence],
    totals: BatchTotals,
    aggregation: Aggregation,
    device: torch.device,
) -> MicroBatch:
    """Return the packed row with the inputs of its loss.

    Parameters
    ----------
    batch
        Packed row.
    shard
        Sequences of this rank.
    totals
        Totals of the optimizer step over all ranks.
    aggregation
        How the loss averages over tokens.
    device
        Device of the tensors.

    """
    chosen = [shard[i] for i in batch.members]
    mask = _values([s.loss_mask for s in chosen], device)
    metric = metric_aggregation(aggregation)
    samples = [s.group_id for s in chosen], [s.trained_elsewhere for s in chosen]
    advantages = [np.broadcast_to(np.float32(s.advantage), s.response_length) for s in chosen]
    on_policy = [
        np.zeros(s.response_length) if s.on_policy_mask is None else s.on_policy_mask
        for s in chosen
    ]
    rollout = _values([s.rollout_log_probs for s in chosen], device)
    loss = LossInputs(
        advantages=_values(advantages, device),
        loss_weights=token_weights(mask, batch.sequence, totals, aggregation, *samples),
        metric_weights=token_weights(mask, batch.sequence, totals, metric, *samples),
        # The log-prob of a masked token is undefined and may be infinite, but 0 x inf is nan.
        rollout_log_probs=torch.where(mask > 0, rollout, 0.0),
        sequence=batch.sequence,
        old_log_probs=_optional([s.old_log_probs for s in chosen], device),
        ref_log_probs=_optional([s.ref_log_probs for s in chosen], device),
        teacher_log_probs=_optional([s.teacher_log_probs for s in chosen], device),
        values=_optional([s.values for s in chosen], device),
        returns=_optional([s.returns for s in chosen], device),
        on_policy_mask=_values(on_policy, device),
        sequences=len(chosen),
        sample_weight=1 / max(totals.sequences, 1),
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
