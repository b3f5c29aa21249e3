"""Conversion of an FSDP2 checkpoint into a Hugging Face checkpoint, in one CPU process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.state_dict_loader import load as read

from sluice.api.groups.trainer import VISION_PARTS
from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.checkpoint.checkpoint_reader import (
    CheckpointPlanner,
    CheckpointReader,
    UnsafeCheckpointError,
    reason,
)
from sluice_trainer.fsdp import mtp
from sluice_trainer.fsdp.export import hf_tensors, own_config
from sluice_trainer.fsdp.loading import Recipe, restore_names
from sluice_trainer.fsdp.sharding import named_tensors
from sluice_trainer.model.complete_checkpoint import save_complete
from sluice_trainer.model.huggingface_files import (
    SHARD_BYTES,
    ConversionError,
    has_tensors,
)


def dist_to_hf(
    checkpoint: Path, like: Path, target: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights of a checkpoint as a Hugging Face checkpoint.

    It needs host memory for one model.

    Parameters
    ----------
    checkpoint
        An `iter_...` directory, or a directory of them; then the newest is converted.
    like
        Hugging Face directory with the model's config, precision and tokenizer.
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
    recipe = Recipe(
        like,
        drawn=True,
        seed=0,
        compute=torch.float32,
        vision=frozenset(VISION_PARTS) if _holds(final, "model.model.visual.") else None,
        mtp=_holds(final, f"model.{mtp.ATTRIBUTE}."),
    )
    dtype = getattr(recipe.config(), "dtype", None) or torch.float32
    model = recipe.blank().to_empty(device="cpu")
    model.tie_weights()
    if has_tensors(like):
        restore_names(model, like, whole=recipe.vision is not None)
        if recipe.mtp:
            first = mtp.loaded(model, like)
            model.mtp.decoder._weight_conversions = first.decoder._weight_conversions
    try:
        reader, tensors = CheckpointReader(final), named_tensors(model)
        # Fails with a short message; torch's own lists the errors of all ranks.
        reader.read_metadata()
        read(
            {"model": tensors},
            storage_reader=reader,
            planner=CheckpointPlanner(),
            no_dist=True,
        )
    except UnsafeCheckpointError as error:
        raise ConversionError(str(error)) from error
    except (Exception, CheckpointException) as error:
        raise ConversionError(
            f"{final} does not hold the model that {like / 'config.json'} describes, written with "
            f"trainer.backend: fsdp: {reason(error)}"
        ) from error
    save_complete(
        hf_tensors(model, dtype, whole=not has_tensors(like)),
        target,
        like,
        shard_bytes=shard_bytes,
        config=own_config(model, like),
    )


def _holds(checkpoint: Path, part: str) -> bool:
    """Return True if names of tensors begin so; False also if the checkpoint cannot be read."""
    try:
        names = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    except (Exception, CheckpointException):
        return False  # reading the tensors fails in a moment, with a message
    return any(name.startswith(part) for name in names)
