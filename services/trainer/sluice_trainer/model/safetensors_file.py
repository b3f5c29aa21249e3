"""Safetensors files with ordinary permissions."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions of any new file.

    safetensors 0.8 makes files readable by their owner only, so an engine that runs as another user
    could not read them, nor could people who fetch the trained model from a volume.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    if path.stat().st_mode != mode:
        path.chmod(mode)
