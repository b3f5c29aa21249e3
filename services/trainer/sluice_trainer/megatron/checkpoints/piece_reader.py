"""Reader of pieces of tensors in a torch_dist checkpoint of any parallel layout.

Megatron's loader needs all pieces of a tensor at once, and stores like layers as one tensor, which
makes that the whole model. torch's reader can read pieces.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from sluice_trainer.checkpoint.checkpoint_reader import CheckpointReader


class MissingPieceError(KeyError):
    """A checkpoint does not hold a requested tensor or piece."""

    def __str__(self) -> str:
        return str(self.args[0])


class PieceReader:
    """Reads pieces of one checkpoint, whose table of contents is read once."""

    def __init__(self, checkpoint: Path) -> None:
        self._reader = CheckpointReader(checkpoint)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def dtype(self, key: str) -> torch.dtype:
        return self._stored(key).properties.dtype

    def read(self, requests: dict[str, ShardedTensor | ShardedTensorFactory]) -> dict[str, Tensor]:
        """Read pieces to the CPU.

        Parameters
        ----------
        requests
            Pieces by name, as in a `sharded_state_dict`.

        Returns
        -------
        The tensors by name.

        Raises
        ------
        MissingPieceError
            If the checkpoint does not hold a piece of this shape.

        """
        targets: dict[tuple[str, torch.Size], Tensor] = {}
        items: list[ReadItem] = []

        def place(piece: ShardedTensor) -> Tensor:
            offset = torch.Size(piece.global_offset)
            size = torch.Size((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
            stored = self._stored(piece.key)
            if len(stored.size) != len(size) or any(
                o + s > n for o, s, n in zip(offset, size, stored.size, strict=True)
            ):
                raise MissingPieceError(
                    f"{piece.key} has shape {tuple(stored.size)}, not {tuple(piece.global_shape)}"
                )
            items.extend(
                create_read_items_for_chunk_list(
                    piece.key, stored, [ChunkStorageMetadata(offset, size)]
                )
            )
            target = torch.empty(size, dtype=stored.properties.dtype)
            targets[piece.key, offset] = target
            return target.view(piece.local_shape)

        placed = {
            name: dict_list_map_outplace(place, request.build())
            if isinstance(request, ShardedTensorFactory)
            else place(request)
            for name, request in requests.items()
        }
        self._reader.read_data(LoadPlan(items), _TargetPlanner(targets)).wait()
        return {
            name: request.merge_fn(placed[name])
            if isinstance(request, ShardedTensorFactory)
            else placed[name]
            for name, request in requests.items()
        }

    def _stored(self, key: str) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise MissingPieceError(f"there is no tensor {key}")
        return stored


class _TargetPlanner(LoadPlanner):
    """A planner that only gives torch's reader a target for each piece; the plan exists already."""

    def __init__(self, targets: dict[tuple[str, torch.Size], Tensor]) -> None:
        self._targets = targets

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None: ...

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index: MetadataIndex = read_item.dest_index
        assert index.offset is not None
        target = self._targets[index.fqn, index.offset]
        for dimension, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dimension, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...
