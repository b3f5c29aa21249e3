"""Directories of gigabytes, deleted beside the training: a file system takes some 0.2 s for each of
them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sluice.telemetry import logs
from sluice_trainer.checkpoint.checkpoint_directory import delete_directory


class BackgroundDeletion:
    """Deletes directories one after another in a thread, for which the process waits at its end."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="removals")

    def add(self, directory: Path) -> None:
        """Delete it, soon. What cannot be deleted is told, and fails nobody."""
        self._thread.submit(_delete, directory)


def _delete(directory: Path) -> None:
    try:
        delete_directory(directory)
    except OSError as error:
        logs.get().warning(
            f"an old checkpoint could not be deleted whole: {error}; "
            f"what is left of it takes room in {directory}"
        )
