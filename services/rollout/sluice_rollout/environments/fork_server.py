"""An interpreter that loads once what episodes share, and forks a child for each of them.

    python fork_server.py MODULE CONFIG

MODULE is the path of a play module. It has two functions:

    load(config)   what all episodes share (imports, an environment), from CONFIG, an object of JSON
    play(loaded)   plays one episode: the one whose row.json lies in the working directory, with its
                   variables in os.environ. It leaves result.json there; a SystemExit with a text
                   says why it failed

As a program, `python MODULE play CONFIG`, it does one after the other: so is it started for each
episode where what is loaded cannot be shared (`reason_not_to_fork`).

Standard input is a socket of whole messages, JSON, to the worker (forking.py):

    to it     {"ready": REASON}             "": it can be forked; else why not, and it ends
    from it   {"play": N}                   beside three descriptors: the request, {directory,
                                            variables} as JSON, and the child's two outputs
    from it   {"end": N}                    kill that child
    to it     {"forked": N, "pid": P}
    to it     {"ended": N, "status": S}     as subprocess has it; or {"error": why there is none}

It ends with its other side, and its children with it. Standard library only: it runs in an
interpreter that need not have sluice.
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

MARK = "SLUICE_EPISODE"
"""The variable by which a worker finds all processes of an episode (orphan_reaper.py)."""
_SEEDED = ("random", "numpy.random", "torch")
"""Modules with a generator that children would share, and a function `seed` that draws anew."""
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_MESSAGE_BYTES = 4096
_SETTLE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class ProcessMark:
    """The place where /proc shows this process's MARK to others: the memory of the variables that
    it was started with. A child writes its own episode's directory there, and is then found by it
    as if it had been started with it; so is whatever it forks.
    """

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])  # env_start and env_end: proc(5)
        block = b"\0" + ctypes.string_at(start, end - start)
        at = block.find(f"\0{MARK}=".encode())
        if at < 0:
            raise OSError(f"its memory does not show the variable {MARK}")
        self._address, self._room = start + at, block.index(b"\0", at + 1) - at - 1

    def write(self, directory: str) -> None:
        """Write it. Raises OSError where it does not fit, or others do not see it."""
        text = f"{MARK}={directory}".encode()
        if len(text) > self._room:
            raise OSError(f"{directory}: a path longer than {self._room} bytes")
        ctypes.memmove(self._address, text.ljust(self._room, b"\0"), self._room)
        if text not in Path("/proc/self/environ").read_bytes().split(b"\0"):
            raise OSError(f"/proc/self/environ does not show {directory}")


class ForkServer:
    """The loop of the interpreter. play: plays the episode of the working directory."""

    def __init__(self, channel: socket.socket, mark: ProcessMark, play: Callable[[], None]) -> None:
        self._channel, self._mark, self._play = channel, mark, play
        self._pids: dict[int, int] = {}
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Until the other side is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without one nothing is written to _wake
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        news = select.poll()
        news.register(self._channel, select.POLLIN)
        news.register(self._woken, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in news.poll()}
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if self._channel.fileno() in ready and not self._handle_message():
                    return
        finally:
            for pid in self._pids.values():
                _kill(pid)

    def _handle_message(self) -> bool:
        """Do what one message says. False: there will be none any more."""
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
        with contextlib.suppress(ChildProcessError):  # there is none any more
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _kill(dead.si_pid)  # its group, while the number cannot be another's
                _, status = os.waitpid(dead.si_pid, 0)
                for number in [n for n, pid in self._pids.items() if pid == dead.si_pid]:
                    del self._pids[number]
                    told = {"ended": number, "status": os.waitstatus_to_exitcode(status)}
                    send(self._channel, told)

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
            if os.getppid() != parent:  # it died before we would have died with it
                os._exit(1)
            with open(request, "rb") as opened:
                self._become_episode(json.load(opened))
            code = _outcome(self._play)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _become_episode(self, request: dict[str, Any]) -> None:
        """Become the process of the episode that was asked for."""
        self._mark.write(request["directory"])
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["variables"])
        tempfile.tempdir = None  # TMPDIR is another
        for name in _SEEDED:
            if module := sys.modules.get(name):
                module.seed()
        atexit._clear()  # what was registered while loading is the parent's to do


def _outcome(play: Callable[[], None]) -> int:
    """The exit status of a program that does this; it ends as every Python does."""
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
    """Kill a child, and its group where it has one by now."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to the worker."""
    channel.send(json.dumps(message).encode())


def descriptors() -> dict[int, str]:
    """This process's open descriptors, and what they are of."""
    at = Path("/proc/self/fd")
    opened = {}
    for name in os.listdir(at):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            opened[int(name)] = os.readlink(at / name)
    return opened


def reason_not_to_fork(before: dict[int, str]) -> str:
    """Reasons, in words, why children of this process would share what cannot be shared; "" where
    there are none. before: its descriptors before it has loaded anything.
    """
    threads, end = os.listdir("/proc/self/task"), time.monotonic() + _SETTLE_SECONDS
    while len(threads) > 1 and time.monotonic() < end:  # one that has been joined may linger
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
    """The play module, under its own name."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(path: str, config: str) -> None:
    """Load, and serve. What packages print as they load goes to standard error."""
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
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
        gc.freeze()  # a collection in a child would copy every page
        ForkServer(channel, mark, lambda: module.play(loaded)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
