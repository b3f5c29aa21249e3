"""Deletion of old checkpoints in the background.

A checkpoint has gigabytes, and a file system takes about 0.2 s to delete each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from sluice.stores import StoreError
from sluice.telemetry import logs
from sluice_trainer.checkpoint.checkpoint_directory import delete_directory


class BackgroundDeletion:
    """Deletes checkpoints one after another in a thread; the process waits for it when it exits."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deletion")

    def add(self, directory: Path) -> None:
        """Delete a directory soon. A failure is only logged."""
        self.submit(partial(delete_directory, directory), str(directory))

    def submit(self, delete: Callable[[], object], name: str) -> None:
        """Call `delete` soon, which deletes `name`. A failure is only logged."""
        self._thread.submit(_delete, delete, name)


def _delete(delete: Callable[[], object], name: str) -> None:
    try:
        delete()
    except (OSError, StoreError) as error:
        logs.get().warning(
            f"an old checkpoint could not be deleted completely: {error}; "
            f"its remaining files take up space in {name}"
        )
