"""Runs one container of a laptop's pod and leaves no process behind.

    python -S -E supervisor.py LIFE_FD GRACE -- COMMAND...

It is the parent of the container's main process and the subreaper of its descendants, including
daemons and processes in other sessions.

- When the main process ends, all remaining descendants are terminated and then killed, and its exit
  code is passed on.
- SIGTERM is passed on to the main process, as in Kubernetes. SIGUSR1 kills everything at once,
  because the grace period is over.
- When the host is gone, the main process is terminated, so that it can end its helpers in order;
  GRACE seconds later everything is killed. The supervisor notices by the end of file on the
  inherited pipe LIFE_FD, which the kernel guarantees even after `kill -9`.

It uses the standard library only and starts without `site`, so that a pod does not wait for its
supervisor.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
PR_SET_PDEATHSIG = 1
_LEFTOVER_GRACE = 1.0
_KILL_DEADLINE = 10.0
_TICK = 1.0


def become_subreaper(enabled: bool) -> bool:
    """Let orphans below this process become its children. Return whether they did before."""
    before = ctypes.c_int()
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(PR_SET_CHILD_SUBREAPER, int(enabled))
    return bool(before.value)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def parents() -> dict[int, int]:
    """Return the parent's pid for all processes that are not zombies."""
    parent_of = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # has ended meanwhile
            if fields[0] not in (b"Z", b"X"):
                parent_of[int(entry)] = int(fields[1])
    return parent_of


def descendants(root: int) -> list[int]:
    """Return all living processes below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    pids: list[int] = []
    todo = [root]
    while todo:
        below = [child for pid in todo for child in children.get(pid, [])]
        pids += below
        todo = below
    return pids


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue  # has ended meanwhile, or belongs to another user now


def reap() -> dict[int, int]:
    """Return the exit codes of children that have ended, by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def end_descendants(grace: float) -> dict[int, int]:
    """Terminate all descendants, kill them after `grace` seconds, and return all exit codes.

    The tree is read again each time, because a process may have forked before the signal.
    """
    me = os.getpid()
    ended = reap()
    start = time.monotonic()
    left = descendants(me)
    if grace > 0:
        send(left, signal.SIGTERM)
        send(left, signal.SIGCONT)
    while left and time.monotonic() - start < grace + _KILL_DEADLINE:
        if time.monotonic() - start >= grace:
            send(left, signal.SIGKILL)
        time.sleep(0.01)
        ended |= reap()
        left = descendants(me)
    return ended | reap()


class Supervisor:
    def __init__(self, life: int, grace: float, command: list[str]) -> None:
        self.life, self.grace, self.command = life, grace, command
        self.parent = os.getppid()
        self.signals, self.wakeup = os.pipe()
        os.set_blocking(self.signals, False)
        os.set_blocking(self.wakeup, False)
        signal.set_wakeup_fd(self.wakeup, warn_on_full_buffer=False)
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGCHLD,
        ):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Run the container, and return its exit code."""
        become_subreaper(True)
        main = self.start()
        poll = select.poll()
        poll.register(self.signals, select.POLLIN)
        poll.register(self.life, select.POLLIN | select.POLLHUP)
        deadline = float("inf")
        while True:
            ready = {fd for fd, _ in poll.poll(_TICK * 1000)}
            received = self.received() if self.signals in ready else set()
            ended = reap()
            if main in ended:
                end_descendants(_LEFTOVER_GRACE)
                return ended[main]
            if signal.SIGUSR1 in received or time.monotonic() > deadline:
                return end_descendants(0).get(main, 128 + signal.SIGKILL)
            host_gone = self.life in ready or os.getppid() != self.parent
            if host_gone and deadline == float("inf"):
                deadline = time.monotonic() + self.grace
                poll.unregister(self.life)
                send([main], signal.SIGTERM)
            if received & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
                send([main], signal.SIGTERM)

    def received(self) -> set[int]:
        try:
            return set(os.read(self.signals, 4096))
        except BlockingIOError:
            return set()

    def start(self) -> int:
        """Start the container in a new session; it inherits neither the lock nor the pipe."""
        for fd in (int(name) for name in os.listdir("/proc/self/fd")):
            if fd > 2:
                try:
                    os.set_inheritable(fd, False)
                except OSError:
                    continue  # the descriptor of this listing
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # in case this supervisor is killed
            for number in (
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
                signal.SIGUSR1,
                signal.SIGCHLD,
                signal.SIGPIPE,
            ):
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(self.command[0], self.command, os.environ)  # noqa: S606
        except OSError as error:
            os.write(2, f"error: cannot start {self.command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)


def main(arguments: list[str]) -> int:
    life, grace, separator, *command = arguments
    if separator != "--" or not command:
        raise SystemExit("usage: supervisor.py LIFE_FD GRACE -- COMMAND...")
    return Supervisor(int(life), float(grace), command).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
