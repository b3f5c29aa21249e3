"""A packed row as Megatron's ranks share it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sluice_trainer.algorithms.aggregation import Aggregation, BatchTotals
from sluice_trainer.batch.sequences import Sequence, TrainSequence
from sluice_trainer.megatron.model.layout import Split, packing
from sluice_trainer.step.packing import MicroBatch, packed_row, with_loss


def micro_batch(
    shard: Seq[Sequence],
    members: Seq[int],
    device: torch.device,
    *,
    split: Split | None = None,
) -> MicroBatch:
    """This rank's share of the packed row of these members of the shard."""
    split = split or Split()
    layout = partial(packing, device=device, split=split)
    batch = packed_row(shard, members, device, layout, multiple=split.multiple)
    if split.context > 1:
        batch = _share(batch, split.local(sum(batch.packing.lengths)).to(device))
    batch.packing.experts = batch.experts
    return batch


def _share(batch: MicroBatch, held: Tensor) -> MicroBatch:
    """The part of a whole row that a rank of the context-parallel group computes.

    held: its tokens' places, [share].
    """
    place = torch.full_like(batch.tokens, -1)
    place[held] = torch.arange(len(held), device=held.device)
    predicted = torch.nonzero(place[batch.predicting] >= 0).squeeze(-1)
    return replace(
        batch,
        tokens=batch.tokens[held],
        predicting=place[batch.predicting[predicted]],
        targets=batch.targets[predicted],
        own=predicted,
        experts=None if batch.experts is None else batch.experts[held],
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
    """The same with what the loss needs."""
    batch = micro_batch(shard, members, device, split=split)
    return with_loss(batch, shard, totals, aggregation, device)
