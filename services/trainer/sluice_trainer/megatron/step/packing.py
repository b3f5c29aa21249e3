"""The tensors of a packed row of sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

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
from sluice_trainer.megatron.model.layout import Packing, Split, packing
from sluice_trainer.sequences import Sequence, TrainSequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed row, or this rank's share of it under context parallelism.

    tokens: [t] int64, all sequences end to end, without each one's last token (it predicts nothing
    that is asked for). predicting: [r] int64, the places in the row that predict the response
    tokens; targets: [r] int64, those tokens; sequence: [r] int64, which member each belongs to.
    members: the sequences' indices; response_lengths: theirs. loss: what the objective needs
    besides, [r]; None outside training. own: [s] int64, which of the r response tokens this rank's
    share predicts; None: all. With it, `tokens`, `predicting` and `targets` are the share's;
    everything that is [r] still is of the whole row. taught: a teacher's hidden states at
    `predicting`, in host memory; None: no divergence over the whole vocabulary.
    """

    tokens: Tensor
    packing: Packing
    predicting: Tensor
    targets: Tensor
    sequence: Tensor
    members: tuple[int, ...]
    response_lengths: tuple[int, ...]
    loss: LossInputs | None = None
    own: Tensor | None = None
    taught: Tensor | None = None

    def split(self, values: Tensor) -> list[Tensor]:
        """[r] values per member."""
        return list(torch.split(values, list(self.response_lengths)))


def micro_batch(
    shard: Seq[Sequence], members: Seq[int], device: torch.device, *, split: Split | None = None
) -> MicroBatch:
    """The packed row of these members of the shard. An empty one gets a single token that predicts
    nothing.

    The row is filled up by a sequence of its own to a length that `split` divides evenly.
    """
    split = split or Split()
    chosen = [shard[i] for i in members]
    rows = [s.tokens[:-1] if len(s.tokens) > 1 else np.zeros(1, np.int32) for s in chosen] or [
        np.zeros(1, np.int32)
    ]
    if fill := -sum(len(row) for row in rows) % split.multiple:
        rows.append(np.zeros(fill, np.int32))
    lengths = [len(row) for row in rows]
    ends = np.cumsum(lengths)
    responses = [s.response_length for s in chosen]
    predicting = [np.arange(end - n, end) for end, n in zip(ends, responses, strict=False)]
    targets = [s.tokens[len(s.tokens) - s.response_length :] for s in chosen]
    batch = MicroBatch(
        tokens=_index(rows, device),
        packing=packing(lengths, device, split),
        predicting=_index(predicting, device),
        targets=_index(targets, device),
        sequence=_index([np.full(n, i) for i, n in enumerate(responses)], device),
        members=tuple(members),
        response_lengths=tuple(responses),
    )
    return batch if split.context == 1 else _share(batch, split.local(sum(lengths)).to(device))


def _share(batch: MicroBatch, held: Tensor) -> MicroBatch:
    """The part of a whole row that a rank of the context-parallel group computes. held: its tokens'
    places, [share].
    """
    place = torch.full_like(batch.tokens, -1)
    place[held] = torch.arange(len(held), device=held.device)
    own = torch.nonzero(place[batch.predicting] >= 0).squeeze(-1)
    return replace(
        batch,
        tokens=batch.tokens[held],
        predicting=place[batch.predicting[own]],
        targets=batch.targets[own],
        own=own,
    )


def train_micro_batch(
    shard: Seq[TrainSequence],
    members: Seq[int],
    totals: BatchTotals,
    aggregation: Aggregation,
    device: torch.device,
    *,
    split: Split | None = None,
) -> MicroBatch:
    """The packed row with what the loss needs."""
    batch = micro_batch(shard, members, device, split=split)
    chosen = [shard[i] for i in members]
    mask = _values([s.loss_mask for s in chosen], device)
    metric = metric_aggregation(aggregation)
    loss = LossInputs(
        advantages=_values(
            [np.broadcast_to(np.float32(s.advantage), s.response_length) for s in chosen], device
        ),
        loss_weights=token_weights(mask, batch.sequence, totals, aggregation),
        metric_weights=token_weights(mask, batch.sequence, totals, metric),
        # A masked token's log-prob means nothing and may be anything, but 0 x inf in a gradient is
        # nan.
        rollout_log_probs=torch.where(
            mask > 0, _values([s.rollout_log_probs for s in chosen], device), 0.0
        ),
        sequence=batch.sequence,
        old_log_probs=_optional([s.old_log_probs for s in chosen], device),
        ref_log_probs=_optional([s.ref_log_probs for s in chosen], device),
        teacher_log_probs=_optional([s.teacher_log_probs for s in chosen], device),
        values=_optional([s.values for s in chosen], device),
        returns=_optional([s.returns for s in chosen], device),
        fresh=_values(
            [np.zeros(s.response_length) if s.fresh is None else s.fresh for s in chosen], device
        ),
    )
    return replace(batch, loss=loss)


def _index(parts: Seq[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    joined = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
    return torch.from_numpy(joined).to(device)


def _values(parts: Seq[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    joined = np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
    return torch.from_numpy(joined).to(device)


def _optional(parts: Seq[Tensor | None], device: torch.device) -> Tensor | None:
    given = [part for part in parts if part is not None]
    if parts and not given:
        return None
    if len(given) != len(parts):
        raise ValueError("either all sequences of a micro-batch have these numbers or none")
    return torch.cat([torch.empty(0), *given]).to(device, torch.float32)
