"""Recording of the experts that a pass chooses, for later passes over the same sequences."""

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
    """A `Forward` that records to which experts its mixtures send the tokens.

    It keeps one byte in host memory for each expert of a token (two with more than 256 experts),
    for the mixtures on this pipeline stage. All ranks that share the stage keep the same record,
    because another packing gives each rank other tokens.
    """

    def __init__(self, forward: Forward, experts: int) -> None:
        """Wrap a forward pass of mixtures with this number of experts."""
        self._forward = forward
        self._stored = torch.uint8 if experts <= 256 else torch.int16
        self._by_sequence: dict[int, list[npt.NDArray[Any]]] = {}

    def __call__(self, model: Any, batch: MicroBatch) -> Tensor:
        record: list[Tensor] = []
        batch.packing.record = record
        output = self._forward(model, batch)
        batch.packing.record = None
        if record:  # one [tokens, experts per token] for each mixture; a chunk may have none
            self._keep(torch.stack(record, 1).flatten(1).to(self._stored), batch)
        return output

    def _keep(self, chosen: Tensor, batch: MicroBatch) -> None:
        """Record experts by sequence.

        Chosen: [this rank's tokens of the row, mixtures x experts].
        """
        # As bytes: neither gloo nor NCCL supports int16.
        row = _gather(chosen.view(torch.uint8), parallel_state.get_tensor_model_parallel_group())
        row = _gather(row, parallel_state.get_context_parallel_group())
        if batch.packing.restore is not None:
            row = row[batch.packing.restore]
        kept = row.cpu().numpy().view(np.uint8 if self._stored == torch.uint8 else np.uint16)
        ends = np.cumsum(batch.packing.lengths)
        for index, part in zip(batch.members, np.split(kept, ends), strict=False):
            self._by_sequence.setdefault(index, []).append(part)

    def experts(self, sequences: int) -> list[Experts | None]:
        """Return `Sequence.experts` for this stage's mixtures; None if it has no mixtures."""
        parts = [self._by_sequence.get(index) for index in range(sequences)]
        return [np.concatenate(chunks, 1) if chunks else None for chunks in parts]


def _gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the values of all ranks of the group along the first dimension."""
    if group.size() == 1:
        return values
    gathered = values.new_empty(group.size() * len(values), *values.shape[1:])
    dist.all_gather_into_tensor(gathered, values.contiguous(), group)
    return gathered
