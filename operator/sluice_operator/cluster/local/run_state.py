"""The run directory: its lock, and the state that survives a crash of the host.

Promise: once `StateFile.save` has returned, the state survives `kill -9` and a power cut, and it is
never half old and half new. It is written to a temporary file, synced and renamed, and the
directory is synced. The lock is an flock that the host and all its supervisors hold, so it is free
only when no process of an earlier run is left.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice_operator.cluster.keys import KEY_BYTES, new_key
from sluice_operator.plan.facts import clock

STATE_FILE = "state.json"
LOCK_FILE = "run.lock"
KEY_FILE = "run.key"
_FORMAT = 1


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used. The text says why."""


@dataclass
class State:
    """The stored objects of a laptop's cluster."""

    job: str | None = None  # the only job of this directory
    status: dict[str, Any] | None = None
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)  # by "Kind/name"
    ports: dict[str, int] = field(default_factory=dict)  # by Service name
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name, as last saved


class StateFile:
    """state.json of a run directory. Only its owner may read it, because it holds the token."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / STATE_FILE

    def load(self) -> State:
        try:
            document = json.loads(self.path.read_text())
        except FileNotFoundError:
            return State()
        except ValueError as error:
            raise RunDirectoryError(
                f"{self.path}: not a state file ({error}); use another run directory"
            ) from error
        if document.pop("format", None) != _FORMAT:
            raise RunDirectoryError(
                f"{self.path}: written by another version of sluice; use another run directory"
            )
        return State(**document)

    def save(self, state: State) -> None:
        temporary = self.path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"format": _FORMAT, **vars(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def key(directory: Path) -> bytes:
    """Read or create the key of the run, from which its token and certificates are derived.

    Only its owner may read the file.
    """
    path = directory / KEY_FILE
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_key().hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    try:
        secret = bytes.fromhex(path.read_text())
    except ValueError:
        secret = b""
    if len(secret) < KEY_BYTES:
        raise RunDirectoryError(
            f"{path}: expected {KEY_BYTES} bytes in hexadecimal; delete it to get a new one"
        )
    return secret


async def lock(directory: Path, wait_seconds: float) -> int:
    """Lock the run directory, and return the descriptor of the lock.

    Parameters
    ----------
    directory
        The run directory.
    wait_seconds
        Seconds to wait for the supervisors of an earlier host to finish.

    Raises
    ------
    RunDirectoryError
        Another process holds the lock.

    """
    path = directory / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise RunDirectoryError(
                    f"{directory} is in use by {_holder(path)}; stop it or use another"
                ) from None
            await asyncio.sleep(0.05)
        else:
            break
    os.ftruncate(descriptor, 0)
    os.pwrite(
        descriptor,
        json.dumps({"pid": os.getpid(), "since": clock.text(datetime.now(UTC))}).encode(),
        0,
    )
    return descriptor


def is_locked(directory: Path) -> bool:
    """Return True while a run uses the directory."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
    except ValueError:
        return "another process"
    return f"process {holder['pid']} (since {holder['since']})"
