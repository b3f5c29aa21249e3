"""A Hugging Face checkpoint with an adapter added to its weights, one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from sluice.api.groups.lora import scaling
from sluice.model_parts import name_in_language_model
from sluice_trainer.lora.files import (
    CONFIG,
    WEIGHTS,
    added,
    read_adapter,
    read_config,
)
from sluice_trainer.model.huggingface_files import (
    ConversionError,
    save_hf,
    stored_tensors,
)

_A, _B = ".lora_A.weight", ".lora_B.weight"


def merge_adapter(adapter: Path, base: Path, target: Path) -> None:
    """Write the checkpoint `base` with W + scaling B A in place of every adapted W.

    Memory: one file of the result (5 GB).

    Parameters
    ----------
    adapter
        Directory of a PEFT adapter, or of a checkpoint that holds one.
    base
        Hugging Face checkpoint that the adapter was trained from.
    target
        Directory to write; an older one of this name is replaced.

    Raises
    ------
    ConversionError
        The adapter has a layer that `base` lacks, or whose shape differs.

    """
    save_hf(_merged(adapter, base), target, base)


def extract_adapter(checkpoint: Path, target: Path) -> None:
    """Copy PEFT's two files out of a checkpoint, without the optimizer."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(checkpoint / name, target / name)


def _merged(adapter: Path, base: Path) -> Iterator[tuple[str, Tensor]]:
    tensors = {
        name_in_language_model(name): tensor for name, tensor in read_adapter(adapter).items()
    }
    config = read_config(adapter)
    if config.get("target_parameters"):
        raise ConversionError(
            f"{adapter} adapts experts, which are single tensors in {base}: merge it with PEFT, or "
            "export merged weights (trainer.lora.export)"
        )
    factor = scaling(
        config["r"], config["lora_alpha"], rank_stabilized=bool(config.get("use_rslora"))
    )
    remaining = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    if single := sorted(layer for layer in remaining if layer + _B not in tensors):
        raise ConversionError(f"{adapter} has no tensor {single[0] + _B}: it is incomplete")
    for name, weight in stored_tensors(base):
        layer = name_in_language_model(name).removesuffix(".weight")
        if layer in remaining:
            remaining.discard(layer)
            a, b = tensors[layer + _A], tensors[layer + _B]
            if (b.shape[0], a.shape[1]) != tuple(weight.shape):
                raise ConversionError(
                    f"{adapter} adapts {name} as {b.shape[0]} x {a.shape[1]}, but in {base} it is "
                    f"{' x '.join(map(str, weight.shape))}: it is another model's adapter"
                )
            weight = added(weight, a, b, factor)
        yield name, weight
    if remaining:
        raise ConversionError(
            f"{adapter} adapts {min(remaining)}, which {base} lacks: it is another model's adapter"
        )
