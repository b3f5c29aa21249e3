"""The directory of checkpoints: which are complete, which is the latest, which go. Files only, no torch.

The promise: `latest` names a complete checkpoint or none; once `commit` has returned, that checkpoint outlives the
machine's processes and (as far as the file system keeps its word on fsync) its power. A checkpoint is written into
`.iter_0000020.tmp`, synced, renamed to `iter_0000020`, and only then `latest_checkpointed_iteration.txt` (Megatron's
name) is replaced. Whatever a crash leaves under a temporary name is ignored, and removed before the next is written.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")


def path_of(directory: Path, step: int) -> Path:
    return directory / f"iter_{step:07d}"


def temporary_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def steps(directory: Path) -> list[int]:
    """Complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(match[1]) for entry in directory.iterdir() if (match := _NAME.fullmatch(entry.name)))


def latest(directory: Path) -> int | None:
    """Step of the newest complete checkpoint; None: there is none.

    A crash between the rename and the tracker leaves the tracker one behind: the newest directory counts, because a
    directory has its final name only when it is complete. The tracker is for Megatron's own tools, and people.
    """
    return max(steps(directory), default=None)


def commit(temporary: Path, final: Path) -> None:
    """Make the checkpoint durable, then visible, then the latest."""
    for file in [*temporary.rglob("*"), temporary]:
        _sync(file)
    temporary.rename(final)
    _sync(final.parent)
    tracker = final.parent / f".{TRACKER}.tmp"
    tracker.write_text(str(int(final.name.removeprefix("iter_"))))
    _sync(tracker)
    tracker.replace(final.parent / TRACKER)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean(directory: Path) -> None:
    """Remove what crashes have left under temporary names."""
    for entry in directory.glob(".*.tmp"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def prune(directory: Path, keep: int) -> list[int]:
    """Delete all but the newest `keep` checkpoints; returns the deleted steps. Call it on one rank.

    A checkpoint first loses its name, so that a kill in the middle leaves none that is half deleted.
    """
    doomed = steps(directory)[:-keep] if keep > 0 else []
    for step in doomed:
        final = path_of(directory, step)
        leaving = final.with_name(f".{final.name}.pruned.tmp")
        final.rename(leaving)
        shutil.rmtree(leaving)
    return doomed
