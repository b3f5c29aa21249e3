"""Child process: attempt 1 of a trainer, which is killed (-9) while it writes checkpoint 2."""

from __future__ import annotations

import os
import signal
import sys

from sluice_trainer.checkpoint import checkpoint_store
from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.checkpoint.checkpoint_store import CheckpointStore

PART = 5 << 20  # the smallest of S3


def save(store: CheckpointStore, step: int, die: str = "") -> None:
    """Write a checkpoint of two shards, the first in three parts; die at a moment of it."""
    checkpoint_store.PART_BYTES = PART
    records = {}
    for name, size in (("__0_0.distcp", 2 * PART + 1), ("__1_0.distcp", 10)):
        with store.writing(step, name) as stream:
            kill(die == "before the first part")
            stream.write(bytes([step]) * (PART + 1))
            kill(die == "amid the parts")
            stream.write(bytes([step]) * (size - PART - 1) if size > PART else b"")
        records[name] = stream.record
    kill(die == "before the manifest")
    store.publish(step, records)
    kill(die == "after the manifest")


def kill(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    attempt = CheckpointStore.of(sys.argv[1], Author(1))
    assert attempt is not None
    attempt.claim()
    save(attempt, 1)
    save(attempt, 2, sys.argv[2])
