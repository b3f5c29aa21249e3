"""Conversion of Hugging Face checkpoints to Megatron's torch_dist format and back, in one process.

The model has no memory (torch's `meta` device), so its size does not matter: it only says which
tensors a torch_dist checkpoint has, and `entries` what they are made of. Conversion to torch_dist
reads, arranges and writes one parameter at a time; conversion back, one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from sluice.api import Parallelism
from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.checkpoint.checkpoint_reader import UnsafeCheckpointError
from sluice_trainer.megatron.adaptations import checkpoint_writer_in_process, megatron_device
from sluice_trainer.megatron.checkpoints.checkpoint import METADATA, weights_state
from sluice_trainer.megatron.checkpoints.piece_reader import MissingPieceError, PieceReader
from sluice_trainer.megatron.huggingface import mapping
from sluice_trainer.megatron.huggingface.entries import Entry
from sluice_trainer.megatron.model.building import build
from sluice_trainer.megatron.model.config import transformer_config
from sluice_trainer.model.complete_checkpoint import save_complete
from sluice_trainer.model.huggingface_config import ModelShape, read_shape
from sluice_trainer.model.huggingface_files import (
    SHARD_BYTES,
    ConversionError,
    Reader,
    reader,
)


class _Skeleton:
    """The model without memory: names, shapes and shards of its tensors."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.entries, _ = mapping.plan(shape, 1)
        self.chunks = build(
            transformer_config(shape, Parallelism(), dtype=dtype), shape, torch.device("meta")
        )
        self.tensors = mapping.named_tensors(self.chunks)

    def state(self) -> dict[str, Any]:
        """Return the sharded tensors of a torch_dist checkpoint, by the model's names."""
        state: dict[str, Any] = weights_state(self.chunks)["model0"]
        return state


@megatron_device()
def hf_to_dist(source: Path, target: Path) -> Path:
    """Write a Hugging Face checkpoint's weights as checkpoint 0 of a directory.

    It needs a process group. The result holds weights only: tools that load a model accept it, but
    training cannot resume from it.

    Parameters
    ----------
    source
        Hugging Face directory.
    target
        Directory of checkpoints.

    Returns
    -------
    Path of the checkpoint.

    Raises
    ------
    ConversionError
        If checkpoint 0 exists already, or cannot be written.

    """
    shape = read_shape(source)
    final = checkpoint_directory.path_of(target, 0)
    if final.exists():
        raise ConversionError(f"{final} exists already: choose another target, or delete it")
    author = checkpoint_directory.Author()
    temporary = checkpoint_directory.temporary_of(final, author)
    checkpoint_directory.claim(target, author)
    temporary.mkdir()
    with reader(source) as read, checkpoint_writer_in_process() as messages:
        skeleton = _Skeleton(shape, read(*mapping.plan(shape, 1)[0][0].hf[0]).dtype)
        request = dist_checkpointing.save(
            {"model": skeleton.state()},
            temporary,
            content_metadata=dict(METADATA),
            async_sharded_save=True,
            async_strategy="mcore",
        )
        rank, buckets, results = request.async_fn_args
        lazy = [
            (path, key, (data, _LazyTensors(tensors, skeleton, read)))
            for path, key, (data, tensors) in buckets
        ]
        request.async_fn(rank, lazy, results)
        try:
            for finish in request.finalize_fns:
                finish()
        except BaseException as error:  # torch's CheckpointException is a BaseException
            raise ConversionError(f"{final} could not be written: {messages or error}") from error
    checkpoint_directory.commit(temporary, final, author)
    return final


class _LazyTensors:
    """Pairs of (item to write, tensor); each tensor is read when needed, and one is kept."""

    def __init__(
        self, tensors: list[tuple[Any, Tensor]], skeleton: _Skeleton, read: Reader
    ) -> None:
        self._tensors = tensors
        # A tensor of the checkpoint may be a view of a part of a parameter's (absent) memory.
        self._sources = {
            _memory(parameter): (entry, expert)
            for entry in skeleton.entries
            for expert, parameter in enumerate(skeleton.tensors[entry.parameter])
        }
        self._read = read

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        @lru_cache(maxsize=1)
        def parameter(memory: int) -> Tensor:
            entry, expert = self._sources[memory]
            count = entry.full[0] if entry.group == "expert" else 1
            sources = entry.sources(expert, count)
            return (
                entry.shard([self._read(name, shape) for name, shape in sources], 0, 1)
                .contiguous()
                .view(-1)
            )

        for item, absent in self._tensors:
            whole = parameter(_memory(absent))
            part = torch.as_strided(
                whole, absent.shape, absent.stride(), absent.storage_offset()
            ).to(absent.dtype)
            # A view would be written with its whole storage.
            yield item, part if part.numel() == whole.numel() else part.clone()


def _memory(tensor: Tensor) -> int:
    """Return a key that exactly the views of a tensor share, even if it has no memory."""
    return int(tensor.untyped_storage()._cdata)


@megatron_device()
def dist_to_hf(
    checkpoint: Path, like: Path, target: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights of a torch_dist checkpoint as a Hugging Face checkpoint.

    It needs a process group.

    Parameters
    ----------
    checkpoint
        An `iter_...` directory, or a directory of them; then the newest is converted.
    like
        Hugging Face directory with the model's config and tokenizer.
    target
        Directory to write to.
    shard_bytes
        Largest size of a file.

    Raises
    ------
    ConversionError
        If the checkpoint cannot be read or does not fit the config.

    """
    final = checkpoint_directory.latest_checkpoint(checkpoint)
    if not (final / "metadata.json").is_file():
        raise ConversionError(
            f"{checkpoint} neither is nor holds a torch_dist checkpoint (no metadata.json)"
        )
    try:
        pieces = PieceReader(final)
    except UnsafeCheckpointError as error:
        raise ConversionError(str(error)) from error
    try:
        skeleton = _Skeleton(read_shape(like), pieces.dtype("embedding.word_embeddings.weight"))
        tensors = mapping.in_checkpoint_order(skeleton.shape, _layer_by_layer(skeleton, pieces))
        save_complete(tensors, target, like, shard_bytes=shard_bytes)
    except MissingPieceError as error:
        raise ConversionError(
            f"{final} does not hold the model that {like / 'config.json'} describes: {error}"
        ) from error


def _layer_by_layer(skeleton: _Skeleton, pieces: PieceReader) -> Iterator[tuple[Entry, Tensor]]:
    """Yield each entry with its full tensor, holding the tensors of one layer at a time."""
    state = skeleton.state()
    names: dict[str, list[str]] = {}
    for name in state:
        names.setdefault(mapping.without_expert_number(name), []).append(name)
    for _, layer in groupby(skeleton.entries, lambda entry: entry.parameter.split(".")[:3]):
        table = list(layer)
        loaded = pieces.read(
            {name: state[name] for entry in table for name in names[entry.parameter]}
        )
        for entry in table:
            tensors = [loaded.pop(name) for name in names[entry.parameter]]
            yield (
                entry,
                (torch.stack(tensors) if entry.group == "expert" else tensors[0]).reshape(
                    entry.full
                ),
            )
