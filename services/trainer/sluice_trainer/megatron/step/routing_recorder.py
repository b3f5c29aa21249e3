"""The experts that a pass over some sequences chooses, kept for passes over the same sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from sluice.samples.sample import Experts
from sluice_trainer.step.packing import Forward, MicroBatch


class RoutingRecorder:
    """A forward pass that keeps where its mixtures send the tokens. Itself a `Forward`.

    In host memory, one byte for each expert of a token (two with more than 256 experts) of the
    mixtures on this pipeline stage. All ranks that share the stage keep the same: another packing
    gives each other tokens.
    """

    def __init__(self, forward: Forward, experts: int) -> None:
        """experts: of a mixture."""
        self._forward = forward
        self._stored = torch.uint8 if experts <= 256 else torch.int16
        self._of_sequence: dict[int, list[npt.NDArray[Any]]] = {}

    def __call__(self, model: Any, batch: MicroBatch) -> Tensor:
        record: list[Tensor] = []
        batch.packing.record = record
        output = self._forward(model, batch)
        batch.packing.record = None
        if record:  # one [tokens, experts of a token] for each mixture; another chunk may have some
            self._keep(torch.stack(record, 1).flatten(1).to(self._stored), batch)
        return output

    def _keep(self, chosen: Tensor, batch: MicroBatch) -> None:
        """chosen: [this rank's tokens of the row, mixtures x experts of a token]."""
        # As bytes: neither gloo nor NCCL knows int16.
        row = _of_ranks(chosen.view(torch.uint8), parallel_state.get_tensor_model_parallel_group())
        row = _of_ranks(row, parallel_state.get_context_parallel_group())
        if batch.packing.restore is not None:
            row = row[batch.packing.restore]
        kept = row.cpu().numpy().view(np.uint8 if self._stored == torch.uint8 else np.uint16)
        ends = np.cumsum(batch.packing.lengths)
        for index, part in zip(batch.members, np.split(kept, ends), strict=False):
            self._of_sequence.setdefault(index, []).append(part)

    def experts(self, sequences: int) -> list[Experts | None]:
        """As `Sequence.experts`, but of this stage's mixtures; None where it has none."""
        parts = [self._of_sequence.get(index) for index in range(sequences)]
        return [np.concatenate(of_chunks, 1) if of_chunks else None for of_chunks in parts]


def _of_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of all ranks of the group, one after the other along the first dimension."""
    if group.size() == 1:
        return values
    gathered = values.new_empty(group.size() * len(values), *values.shape[1:])
    dist.all_gather_into_tensor(gathered, values.contiguous(), group)
    return gathered
