"""A plugin's files are copied to where an engine's container mounts them."""

from __future__ import annotations

import os
from pathlib import Path


def install(source: Path, target: Path) -> None:
    """Copy a directory, links as what they point at.

    On a laptop engines share the target: one may start while another's files come.
    """
    for file in source.rglob("*"):
        if not file.is_file() or file.parent.name == "__pycache__":
            continue
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        unfinished = copy.with_name(f".{copy.name}-{os.getpid()}")
        unfinished.write_bytes(file.read_bytes())
        unfinished.replace(copy)
