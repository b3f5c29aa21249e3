"""Processes that import SGLang while its server still does, and then become its parts.

SGLang's server imports everything, spawns the process that generates, and that one imports it all
again: a third of an engine's start. Here Python processes that have imported it stand ready for
what the server spawns. Each takes its command's place, with its descriptors and its environment.
Where anything that was looked at meanwhile has changed, or SGLang could not be imported, it starts
anew, as a spawned process does: it replaces itself by the command.
"""

import ctypes
import importlib
import json
import logging
import multiprocessing.util
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from . import numa
from .arguments import has, number

MODULES = ("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager")
"""What spawned processes import before they do anything."""
PREPARED = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "AUTO"}
"""Variables for CUDA, which may look at them while modules are imported. SGLang's server gives them
these values in any case, but later."""
MOST_RANKS = 64
"""Of an engine on one machine. SGLang will refuse more than there are GPUs."""
WAIT_SECONDS = 600.0
"""For a command. The server may have to fetch its model before."""
_LOADED = ("CUDA_", "GLIBC_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH_")
"""Of variables that libraries look at when they are loaded, unseen by Python."""
_RESERVED = 256
"""Descriptors that modules may not open while they are imported: the command's have their numbers.
"""
_LENGTH = struct.Struct("!Q")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
log = logging.getLogger(__name__)


# --- in the server


def parts(arguments: list[str]) -> list[bool]:
    """One for each process that a server with these arguments spawns on this machine, in their
    order: whether the memory saver's library is loaded before all others in it.
    """
    tensor = number(arguments, 1, "--tp-size", "--tensor-parallel-size", "--tp")
    pipeline = number(arguments, 1, "--pp-size", "--pipeline-parallel-size")
    nodes = max(number(arguments, 1, "--nnodes"), 1)
    one_controls = number(arguments, 1, "--dp-size", "--data-parallel-size", "--dp") > 1
    ranks = 1 if one_controls else min(max(tensor * pipeline // nodes, 1), MOST_RANKS)
    saves_memory = has(arguments, "--enable-memory-saver") and not one_controls
    answers_here = number(arguments, 0, "--node-rank") == 0
    return [saves_memory] * ranks + [False] * answers_here


def begin(processes: Sequence[bool]) -> None:
    """Start so many, which take the places of the next processes that this one spawns.

    processes: as from `parts`.
    """
    os.environ.update(PREPARED)
    try:
        ready = [start(saves_memory) for saves_memory in processes]
    except (ImportError, RuntimeError) as error:  # what SGLang will end with
        log.warning("no process of the engine is prepared: %s", error)
        return
    spawn = multiprocessing.util.spawnv_passfds

    def spawned(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        """In place of multiprocessing's function; the process' id."""
        if arguments[-1] == "--multiprocessing-fork":
            while ready:
                pid, line = ready.pop(0)
                with line:
                    if hand_over(line, path, arguments, descriptors):
                        return pid
        return spawn(path, arguments, descriptors)

    multiprocessing.util.spawnv_passfds = spawned  # type: ignore[assignment]


def start(saves_memory: bool) -> tuple[int, socket.socket]:
    """A process that prepares itself, and the line to it."""
    ours, theirs = socket.socketpair()
    with theirs, memory_saver() if saves_memory else nullcontext():
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from sluice_sglang.startup import preforked_processes; "
            f"exec(preforked_processes.program({theirs.fileno()}, {os.getpid()}))"
        )
        path = os.fsencode(sys.executable)
        command = [path, *map(os.fsencode, options()), b"-c", program.encode()]
        pid = multiprocessing.util.spawnv_passfds(path, command, [theirs.fileno()])
    return pid, ours


def memory_saver() -> AbstractContextManager[None]:
    """The environment in which SGLang starts a process that shall give its GPU's memory away: with
    a library for the linker. Imports torch, as the server will.
    """
    saver: AbstractContextManager[None] = importlib.import_module(
        "torch_memory_saver"
    ).configure_subprocess()
    return saver


def options() -> list[str]:
    """This interpreter's own, which multiprocessing gives to those that it spawns."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def hand_over(
    line: socket.socket, path: Any, arguments: Sequence[Any], descriptors: Sequence[int]
) -> bool:
    """Have a prepared process take this command's place. False: it is gone."""
    numbers = sorted(map(int, descriptors))
    if numbers and numbers[-1] >= _RESERVED:
        return False
    words = [os.fsdecode(word) for word in arguments]
    message = json.dumps([os.fsdecode(path), words, numbers, dict(os.environ)]).encode()
    line.settimeout(WAIT_SECONDS)
    try:
        socket.send_fds(line, [_LENGTH.pack(len(message))], numbers)
        line.sendall(message)
    except OSError as error:
        log.warning("a prepared process is gone, another one is spawned: %s", error)
        return False
    return True


# --- in a prepared process


def program(descriptor: int, server: int) -> str:
    """Import SGLang and wait for a command: its program, for this process to run in its place.
    Ends where none comes, or where the server is gone.

    descriptor: of the line to the server. server: its process.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != server:
        sys.exit()
    line = socket.socket(fileno=descriptor)
    reserved = reserve(descriptor)
    seen, failure = import_modules()
    command = received(line)
    if command is None:
        sys.exit()
    path, arguments, numbers, environment, descriptors = command
    libc.prctl(_DEATH_SIGNAL, 0)
    line.close()
    for one in reserved:
        os.close(one)
    take_places(descriptors, numbers)
    own = [sys.executable, *options(), "-c"]
    if reason := failure or unfit(path, arguments, own, adopt(environment), seen):
        log.warning("a process of the engine starts anew: %s", reason)
        os.execve(path, arguments, environment)  # noqa: S606 - what the server spawns
    sys.argv = ["-c", *arguments[len(own) + 1 :]]
    code: str = arguments[len(own)]
    return code


def reserve(taken: int) -> list[int]:
    """Open all descriptors below _RESERVED but the standard ones and `taken`, which was open."""
    one = os.open(os.devnull, os.O_RDONLY)
    reserved = [one]
    while reserved[-1] < _RESERVED - 1:
        reserved.append(os.dup(one))
    return reserved


def import_modules() -> tuple[set[str], str]:
    """Import what spawned processes do. The variables that were looked at meanwhile, and why it
    could not be done; empty: it was.
    """
    seen: set[str] = set()
    plain = type(os.environ)

    class Noting(plain):  # type: ignore[valid-type, misc]
        def __getitem__(self, name: str) -> str:
            seen.add(name)
            value: str = super().__getitem__(name)
            return value

    os.environ.__class__ = Noting
    try:
        for module in MODULES:
            importlib.import_module(module)
    except Exception as error:  # a command may have come already, and will meet what it meets
        return seen, f"it could not import what it will need: {error}"
    finally:
        os.environ.__class__ = plain
    return seen, ""


def received(line: socket.socket) -> Any:
    """(path, arguments, numbers, environment, descriptors) of the command. None: there is none."""
    line.settimeout(WAIT_SECONDS)
    try:
        header, descriptors, _, _ = socket.recv_fds(line, _LENGTH.size, _RESERVED)
        if not header:
            return None
        left, parts = _LENGTH.unpack(header)[0], list[bytes]()
        while left:
            parts.append(line.recv(left))
            if not parts[-1]:
                return None
            left -= len(parts[-1])
    except OSError:
        return None
    return (*json.loads(b"".join(parts)), descriptors)


def take_places(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they have in the command, for it and what it starts."""
    for descriptor, its_number in zip(descriptors, numbers, strict=True):
        os.dup2(descriptor, its_number)
    for descriptor in descriptors:
        os.close(descriptor)


def adopt(environment: dict[str, str]) -> set[str]:
    """Take the command's environment. Variables whose values it changes."""
    own = dict(os.environ)
    changed = {name for name in own | environment if own.get(name) != environment.get(name)}
    for name in changed & own.keys():
        del os.environ[name]
    os.environ.update({name: environment[name] for name in changed & environment.keys()})
    return changed


def unfit(
    path: str, arguments: list[str], own: list[str], changed: set[str], seen: set[str]
) -> str:
    """Why this process cannot take a command's place; empty: it can, and is bound as that is."""
    late = sorted(name for name in changed if name in seen or name.startswith(_LOADED))
    if late:
        return f"{', '.join(late)} had been looked at before the server changed it"
    is_this = path == own[0] or numa.bind(numa.options(path, own[0]))
    if not is_this or arguments[1 : len(own)] != own[1:]:
        return f"the command is {path}, and this is {own[0]}"
    return ""
