"""The run directory: who may use it, and what survives a crash of the host.

Promise: what `Store.save` has returned for is there after `kill -9` or a power cut, whole; the
state is never half old and half new (written to a temporary file, synced, renamed, and the
directory synced). The lock is an flock that the host and all its supervisors hold, so that it is
free only when no process of the former run is left.
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
    """The memory of a laptop's cluster.

    job: the one job of this directory. objects: by "Kind/name". pods: by name, as they were when
    they were last written. ports: Service name -> port.
    """

    job: str | None = None
    status: dict[str, Any] | None = None
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)


class StateFile:
    """state.json of one run directory. It holds the job's token, so only its owner may read it."""

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
    """The key of this run, from which its token and certificates are derived. Only its owner may
    read it.
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
    """The descriptor of the held lock. Waits a little for a former host's supervisors to finish
    their work.
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
    """True while a run works on the directory."""
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
