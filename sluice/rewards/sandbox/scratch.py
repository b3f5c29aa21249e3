"""Where a process keeps the directories of its programs. Standard library only.

Each process holds a lock on a directory of its own. One that was killed cannot clean up, so the
next one removes what nobody holds.
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

# Beginning of the names of zygotes' directories.
SANDBOX = "sluice-sandbox-"


@contextlib.contextmanager
def directory(prefix: str = SANDBOX) -> Iterator[str]:
    """A directory for as long as this process needs it; those of this prefix whose processes are
    gone are removed first.
    """
    _sweep(prefix)
    path, lock = _locked(prefix)
    try:
        yield path
    finally:
        with contextlib.suppress(
            FileNotFoundError
        ):  # whatever tidies up temporary directories was here
            tree.remove(path)
        os.close(lock)


def _locked(prefix: str) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=prefix)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process took it for an abandoned one; so it does below
        if _lock(lock) and os.path.exists(path):
            os.chmod(path, 0o711)  # noqa: S103  (a program of another user passes through to its own directory)
            return path, lock
        os.close(lock)


def _sweep(prefix: str) -> None:
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{prefix}*")):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone already, or another user's
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
