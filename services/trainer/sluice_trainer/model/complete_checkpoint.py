"""What a job makes of its source checkpoint: trained tensors, and all others as they were.

A job trains the language model of a checkpoint. Towers for pictures or sound, their projectors and
layers that predict further tokens are kept, so whoever loads the result finds all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from sluice_trainer.model.huggingface_files import (
    SHARD_BYTES,
    Config,
    ConversionError,
    StoredTensors,
    has_tensors,
    read_config,
    save_hf,
    stored,
)

_HEAD = re.compile(r"(model\.|language_model\.)*lm_head\.weight")
_EMBEDDING = re.compile(r"(model\.|language_model\.)*embed_tokens\.weight")


class Completion:
    """Decides which tensors of the source follow those that were trained.

    `names` are those of the checkpoint that the job started from.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._missing = dict.fromkeys(names)
        self._embedding: Tensor | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Note that a trained tensor is written."""
        self._missing.pop(name, None)
        if _EMBEDDING.fullmatch(name) and any(map(_HEAD.fullmatch, self._missing)):
            self._embedding = tensor.detach().to("cpu", copy=True)

    def rest(self, source: StoredTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield all other tensors of the source, one at a time.

        An output layer that was not trained is the embedding: the model ties them, although the
        source stores both.
        """
        for name in self._missing:
            if _HEAD.fullmatch(name) and self._embedding is not None:
                yield name, self._embedding
            else:
                yield name, source.read(name)


def complete(
    trained: Iterable[tuple[str, Tensor]], source: StoredTensors
) -> Iterator[tuple[str, Tensor]]:
    """Yield trained tensors in the precision of the source, then its other tensors.

    Parameters
    ----------
    trained
        Names of the source, and full tensors.
    source
        Tensors of the checkpoint that the job started from.

    Raises
    ------
    ConversionError
        A tensor has another shape than in the source.

    """
    completion = Completion(source.names)
    for name, tensor in trained:
        completion.add(name, tensor)
        yield name, _like_stored(name, tensor, source)
    for name, tensor in completion.rest(source):
        yield name, _like_stored(name, tensor, source)


def _like_stored(name: str, tensor: Tensor, source: StoredTensors) -> Tensor:
    # Stored once, as the embedding, although config.json does not call the weights tied.
    if name not in source.names:
        return tensor
    before = source.read(name)
    if before.shape != tensor.shape:
        raise ConversionError(
            f"{source.place(name)}: {name} has shape {tuple(before.shape)}, but the trained tensor "
            f"has {tuple(tensor.shape)}: name the checkpoint that the job started from"
        )
    return tensor.to(before.dtype)


def save_complete(
    trained: Iterable[tuple[str, Tensor]],
    directory: Path,
    source: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    config: Config | None = None,
) -> None:
    """Write a checkpoint with all tensors and files of `source`, trained ones with their new value.

    Parameters
    ----------
    trained
        Names and full tensors.
    directory
        Directory of the new checkpoint; an older one is replaced.
    source
        Checkpoint that the job started from. If it has no tensors, only the trained ones are
        written.
    shard_bytes
        Size of a file.
    config
        Configuration of a model that has only the trained tensors, if it is not the source's.

    """
    if not has_tensors(source):
        described = read_config(source) if config is None else config
        save_hf(trained, directory, source, shard_bytes=shard_bytes, config=described)
        return
    with stored(source) as tensors:
        save_hf(complete(trained, tensors), directory, source, shard_bytes=shard_bytes)
