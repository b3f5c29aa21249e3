"""A user of the program's own, where the sandbox may change users. Standard library only.

What belongs to the pod's user is then a stranger's to the program, and what the kernel counts by
user (threads, pipes) is counted for the program alone.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable

_HIGH = (
    0x70000000,
    1 << 27,
)  # (first, how many): nobody gives these to users or containers (systemd's list of uids)
_LOW = (60_001, 500)  # in a pod of a user namespace of its own there are 65,536 users
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7}


def candidates() -> list[int]:
    """Uids to try. They differ from sandbox to sandbox: the kernel counts a user's threads over the
    whole node.
    """
    return [first + secrets.randbelow(size) for first, size in (_HIGH, _LOW)]


def require_capabilities() -> None:
    """Raises OSError where this process cannot run a program as another user, end it, or clean up
    after it.
    """
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("CapEff:"))
    held = int(line.split()[1], 16)
    if lacking := [f"CAP_{name}" for name, bit in _CAPABILITIES.items() if not held >> bit & 1]:
        raise OSError(errno.EPERM, f"this process lacks {', '.join(lacking)}")


def take(uid: int) -> None:
    """Be this user, and no other, in this user's group, for good. Raises OSError."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def require_readable(paths: Iterable[str]) -> None:
    """Raises OSError where this user cannot read one of the paths; what does not exist aside."""
    for path in paths:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            continue
        if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
