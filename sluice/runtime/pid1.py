"""The first process of a container, which has two duties that no other process has.

The kernel spares it signals that it has no handler for, so a pod that is deleted while it starts
would ignore that until the end of its grace. And it inherits each process whose parent has ended:
if it does not wait for those, they stay as zombies until the container has no process ids left.
Both are left to a small process of a few megabytes, this file as a program, and the role runs as
its child. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys

_FORWARDED = {
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
}  # fmt: skip
_AWAITED = _FORWARDED | {signal.SIGCHLD}


def run_under_init() -> None:
    """Go on as a child of a small init, if this is the first process of a container."""
    if os.getpid() != 1:
        return
    # Blocked signals wait for the init, also while its interpreter starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    child = os.fork()
    if child:
        words = [sys.executable, "-I", "-S", __file__, str(child)]
        os.execve(sys.executable, words, _variables())  # noqa: S606 - our own program
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _variables() -> dict[str, str]:
    """Variables of the init, without the job's token: user programs could read it there."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def watch(child: int) -> int:
    """Forward signals to the child, and wait for every other process, until the child has ended.

    Returns its exit code, as a shell has it.
    """
    while True:
        number = signal.sigwait(_AWAITED)
        if number != signal.SIGCHLD:
            os.kill(child, number)
        elif (code := _reaped(child)) is not None:
            return code


def _reaped(child: int) -> int | None:
    """Wait for all processes that have ended; the exit code of the child if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def hide() -> None:
    """Make this process unreadable for other programs of its user.

    It holds the container's output open, as the role does.
    """
    import ctypes  # only in the init

    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0)


if __name__ == "__main__":
    hide()
    sys.exit(watch(int(sys.argv[1])))
