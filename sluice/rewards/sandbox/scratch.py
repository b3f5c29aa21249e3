"""Scratch directories for programs. Standard library only.

Each process locks its directory. A killed process cannot clean up, so the next one removes
directories without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import sys
import tempfile
from collections.abc import Iterator

from sluice.rewards.sandbox import tree

# Prefix of the names of zygotes' directories.
SANDBOX = "sluice-sandbox-"


@contextlib.contextmanager
def directory(prefix: str = SANDBOX) -> Iterator[str]:
    """Create a scratch directory until the block ends.

    First remove abandoned ones with this prefix.
    """
    _sweep(prefix)
    path, lock = _locked(prefix)
    try:
        yield path
    finally:
        with contextlib.suppress(
            FileNotFoundError
        ):  # removed by a cleaner of temporary directories
            tree.remove(path)
        os.close(lock)


def _locked(prefix: str) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=prefix)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process removed it as abandoned, as `_sweep` does
        if _lock(lock) and os.path.exists(path):
            os.chmod(path, 0o711)  # noqa: S103  (programs of another user must reach their directory inside)
            return path, lock
        os.close(lock)


def _sweep(prefix: str) -> None:
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{prefix}*")):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # already removed, or owned by another user
        try:
            if os.fstat(lock).st_uid == os.geteuid() and _lock(lock):
                tree.remove(path)
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            print(f"{path} cannot be removed: {error}", file=sys.stderr, flush=True)
        finally:
            os.close(lock)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
