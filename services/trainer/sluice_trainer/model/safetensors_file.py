"""Safetensors files that others may read as well."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions that any new file gets here.

    safetensors 0.8 leaves it to its owner alone. An engine that runs as another user, or who
    fetches the trained model from a volume, could not read it.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    if path.stat().st_mode != mode:
        path.chmod(mode)
