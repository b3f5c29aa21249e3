"""An interpreter that loads once what episodes share, and forks a child for each episode.

    python fork_server.py MODULE CONFIG

MODULE is the path of a play module. It has two functions:

    load(config)   loads what all episodes share (imports, an environment) from CONFIG, a JSON
                   object
    play(loaded)   plays the episode of the working directory's row.json, with the episode's
                   variables in os.environ, and writes result.json. If it fails, it raises
                   SystemExit with the reason

`python MODULE play CONFIG` does both. Episodes are played so if what the module loads cannot be
shared (`reason_not_to_fork`).

Standard input is a socket of whole JSON messages to the worker (fork_server_process.py):

    to it     {"ready": REASON}             "" if it can be forked. Otherwise the reason; the
                                            interpreter then ends
    from it   {"play": N}                   with three descriptors: the request, {directory,
                                            variables} as JSON, and the child's two outputs
    from it   {"end": N}                    kill that child
    to it     {"forked": N, "pid": P}
    to it     {"ended": N, "status": S}     S as in subprocess; or {"error": why no child started}

When the other side closes the socket, the interpreter and its children end. It uses the standard
library only, because it runs in an interpreter that may not have sluice.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# The variable by which a worker finds all processes of an episode (orphan_reaper.py).
MARK = "SLUICE_EPISODE"
# Modules with a random generator that children would share; `seed()` gives it a new state.
_SEEDED = ("random", "numpy.random", "torch")
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_MESSAGE_BYTES = 4096
_SETTLE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class ProcessMark:
    """The place in memory from which /proc shows this process's MARK to other processes.

    /proc shows the memory of the variables with which a process was started. A child writes its
    episode's directory there, and is then found as if it had been started with it, and so are the
    processes that it forks.
    """

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])  # env_start and env_end: proc(5)
        block = b"\0" + ctypes.string_at(start, end - start)
        at = block.find(f"\0{MARK}=".encode())
        if at < 0:
            raise OSError(f"this process's memory does not contain the variable {MARK}")
        self._address, self._size = start + at, block.index(b"\0", at + 1) - at - 1

    def write(self, directory: str) -> None:
        """Set the mark. Raises OSError if it does not fit or /proc does not show it."""
        text = f"{MARK}={directory}".encode()
        if len(text) > self._size:
            raise OSError(f"{directory}: a path longer than {self._size} bytes")
        ctypes.memmove(self._address, text.ljust(self._size, b"\0"), self._size)
        if text not in Path("/proc/self/environ").read_bytes().split(b"\0"):
            raise OSError(f"/proc/self/environ does not show {directory}")


class ForkServer:
    """The main loop of the interpreter.

    `play` plays the episode of the working directory.
    """

    def __init__(self, channel: socket.socket, mark: ProcessMark, play: Callable[[], None]) -> None:
        self._channel, self._mark, self._play = channel, mark, play
        self._pids: dict[int, int] = {}
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Handle messages until the other side closes the socket."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, _wake stays silent
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if self._channel.fileno() in ready and not self._handle_message():
                    return
        finally:
            for pid in self._pids.values():
                _kill(pid)

    def _handle_message(self) -> bool:
        """Handle one message. Returns False if the other side has closed the socket."""
        text, descriptors, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, 3)
        if not text:
            return False
        message = json.loads(text)
        if "play" in message:
            self._fork(message["play"], descriptors)
        elif pid := self._pids.get(message["end"]):
            _kill(pid)
        else:
            send(self._channel, {"ended": message["end"], "status": -signal.SIGKILL})
        return True

    def _fork(self, number: int, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            send(self._channel, {"ended": number, "error": f"fork: {error.strerror}"})
        else:
            if pid == 0:
                self._run_child(*descriptors)
            self._pids[number] = pid
            send(self._channel, {"forked": number, "pid": pid})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # no child is left
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _kill(dead.si_pid)  # and its group, while the pid cannot be reused
                _, wait_status = os.waitpid(dead.si_pid, 0)
                for number in [n for n, pid in self._pids.items() if pid == dead.si_pid]:
                    del self._pids[number]
                    status = os.waitstatus_to_exitcode(wait_status)
                    send(self._channel, {"ended": number, "status": status})

    def _run_child(self, request: int, out: int, err: int) -> NoReturn:
        parent, code = os.getppid(), 1
        try:
            os.setsid()
            os.dup2(out, 1)
            os.dup2(err, 2)
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            for descriptor in (out, err, self._woken, self._wake):
                os.close(descriptor)
            if os.getppid() != parent:  # the parent died before prctl took effect
                os._exit(1)
            with open(request, "rb") as opened:
                self._become_episode(json.load(opened))
            code = _outcome(self._play)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _become_episode(self, request: dict[str, Any]) -> None:
        """Become the process of the requested episode."""
        self._mark.write(request["directory"])
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["variables"])
        tempfile.tempdir = None  # TMPDIR has changed
        for name in _SEEDED:
            if module := sys.modules.get(name):
                module.seed()
        atexit._clear()  # handlers registered while loading belong to the parent


def _outcome(play: Callable[[], None]) -> int:
    """Play, then end as Python does. Returns the exit status."""
    code = 0
    try:
        play()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code & 0xFF


def _kill(pid: int) -> None:
    """Kill a child, and its group if it has one already."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to the worker."""
    channel.send(json.dumps(message).encode())


def descriptors() -> dict[int, str]:
    """Return this process's open descriptors, and the file of each."""
    folder = Path("/proc/self/fd")
    opened = {}
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            opened[int(name)] = os.readlink(folder / name)
    return opened


def reason_not_to_fork(before: dict[int, str]) -> str:
    """Say why this process cannot be forked: threads, processes or open files. "" if it can be.

    `before` holds the descriptors that were open before the play module was loaded.
    """
    threads, end = os.listdir("/proc/self/task"), time.monotonic() + _SETTLE_SECONDS
    while len(threads) > 1 and time.monotonic() < end:  # a joined thread may still be listed
        time.sleep(0.01)
        threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        return f"it has {len(threads)} threads"
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "it has started processes"
    opened = {n: what for n, what in descriptors().items() if before.get(n) != what}
    kept = sorted({what for what in opened.values() if what not in _HARMLESS})
    return f"it keeps open {', '.join(kept)}" if kept else ""


def _module(path: str) -> Any:
    """Import the play module under its own name."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(path: str, config: str) -> None:
    """Load the play module and serve. Output of packages while they load goes to standard error."""
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = [path]
    mark, before = ProcessMark(), descriptors()
    with contextlib.redirect_stdout(sys.stderr):
        module = _module(path)
        loaded = module.load(json.loads(config))
    sys.stderr.flush()
    reason = reason_not_to_fork(before)
    send(channel, {"ready": reason})
    if not reason:
        gc.collect()
        gc.freeze()  # or a collection in a child would copy every page
        ForkServer(channel, mark, lambda: module.play(loaded)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
