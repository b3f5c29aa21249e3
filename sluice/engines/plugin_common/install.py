"""Copies a plugin's files to the directory that an engine's container mounts."""

from __future__ import annotations

import os
from pathlib import Path


def install(source: Path, target: Path) -> None:
    """Copy a directory, with links as the files that they point at.

    Each file is replaced at once: on a laptop engines share the target, so one may start while the
    files of another are copied.
    """
    for file in source.rglob("*"):
        if not file.is_file() or file.parent.name == "__pycache__":
            continue
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        unfinished = copy.with_name(f".{copy.name}-{os.getpid()}")
        unfinished.write_bytes(file.read_bytes())
        unfinished.replace(copy)
