"""Processes that import SGLang while its server still does, and then become its parts.

SGLang's server imports all modules and spawns the process that generates, which imports them again:
a third of an engine's start. Here Python processes that have imported them are ready when the
server spawns one. Each takes the place of a command, with its descriptors and its environment. If a
variable that was read during the import has changed since, or SGLang could not be imported, the
process replaces itself by the command and starts anew, as a spawned process does.
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

# Imported by spawned processes before they do anything else.
MODULES = ("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager")
# Variables for CUDA, which may read them while modules are imported. SGLang's server sets the same
# values, but later.
PREPARED = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "AUTO"}
# Limit for an engine on one machine. SGLang refuses more ranks than there are GPUs.
MOST_RANKS = 64
# Limit of the wait for a command. The server may have to download its model before.
WAIT_SECONDS = 600.0
# Prefixes of variables that libraries read when they are loaded, unseen by Python.
_LOADED = ("CUDA_", "GLIBC_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH_")
# Descriptors that modules may not use while they are imported, because the command's have their
# numbers.
_RESERVED = 256
_LENGTH = struct.Struct("!Q")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
log = logging.getLogger(__name__)


# --- in the server


def parts(arguments: list[str]) -> list[bool]:
    """Return one entry for each process that a server with these arguments spawns, in order.

    The entry is True if the memory saver's library is loaded before all others in that process.
    """
    tensor = number(arguments, 1, "--tp-size", "--tensor-parallel-size", "--tp")
    pipeline = number(arguments, 1, "--pp-size", "--pipeline-parallel-size")
    nodes = max(number(arguments, 1, "--nnodes"), 1)
    has_controller = number(arguments, 1, "--dp-size", "--data-parallel-size", "--dp") > 1
    ranks = 1 if has_controller else min(max(tensor * pipeline // nodes, 1), MOST_RANKS)
    saves_memory = has(arguments, "--enable-memory-saver") and not has_controller
    answers_here = number(arguments, 0, "--node-rank") == 0
    return [saves_memory] * ranks + [False] * answers_here


def begin(processes: Sequence[bool]) -> None:
    """Start processes that take the places of the next ones that this process spawns.

    `processes` is what `parts` returns.
    """
    os.environ.update(PREPARED)
    try:
        ready = [start(saves_memory) for saves_memory in processes]
    except (ImportError, RuntimeError) as error:  # what SGLang will end with
        log.warning("cannot prepare processes of the engine: %s", error)
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
    """Start a process that imports SGLang; return its id and the socket to it."""
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
    """Return the environment of a process that must be able to release its GPU's memory.

    The environment names a library for the linker. Imports torch, as the server does.
    """
    saver: AbstractContextManager[None] = importlib.import_module(
        "torch_memory_saver"
    ).configure_subprocess()
    return saver


def options() -> list[str]:
    """Return this interpreter's options, which multiprocessing gives to spawned processes."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def hand_over(
    line: socket.socket, path: Any, arguments: Sequence[Any], descriptors: Sequence[int]
) -> bool:
    """Let a prepared process take this command's place. Returns False if it is gone."""
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
        log.warning("a prepared process is gone, so another is spawned: %s", error)
        return False
    return True


# --- in a prepared process


def program(descriptor: int, server: int) -> str:
    """Import SGLang, wait for a command, and return the program to run in its place.

    Ends the process if no command comes or the server is gone. `descriptor` is the socket to the
    server, and `server` its process id.
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
    for placeholder in reserved:
        os.close(placeholder)
    take_places(descriptors, numbers)
    prefix = [sys.executable, *options(), "-c"]
    if reason := failure or unfit(path, arguments, prefix, adopt(environment), seen):
        log.warning("a process of the engine starts anew: %s", reason)
        os.execve(path, arguments, environment)  # noqa: S606 - what the server spawns
    sys.argv = ["-c", *arguments[len(prefix) + 1 :]]
    code: str = arguments[len(prefix)]
    return code


def reserve(taken: int) -> list[int]:
    """Open all descriptors below _RESERVED but the standard ones and `taken`, which is open."""
    null = os.open(os.devnull, os.O_RDONLY)
    reserved = [null]
    while reserved[-1] < _RESERVED - 1:
        reserved.append(os.dup(null))
    return reserved


def import_modules() -> tuple[set[str], str]:
    """Import the modules of spawned processes.

    Returns the variables that were read meanwhile, and why the import failed; empty if it did not.
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
    except Exception as error:  # the command, which runs anew then, will fail in the same way
        return seen, f"it could not import what it will need: {error}"
    finally:
        os.environ.__class__ = plain
    return seen, ""


def received(line: socket.socket) -> Any:
    """Return (path, arguments, numbers, environment, descriptors); None without a command."""
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
    """Give descriptors the numbers that they have in the command and its children."""
    for descriptor, its_number in zip(descriptors, numbers, strict=True):
        os.dup2(descriptor, its_number)
    for descriptor in descriptors:
        os.close(descriptor)


def adopt(environment: dict[str, str]) -> set[str]:
    """Take the command's environment. Returns the variables whose values changed."""
    before = dict(os.environ)
    names = before | environment
    changed = {name for name in names if before.get(name) != environment.get(name)}
    for name in changed & before.keys():
        del os.environ[name]
    os.environ.update({name: environment[name] for name in changed & environment.keys()})
    return changed


def unfit(
    path: str, arguments: list[str], prefix: list[str], changed: set[str], seen: set[str]
) -> str:
    """Return why this process cannot take a command's place.

    Empty if it can; it is then bound to processors as the command would be.
    """
    late = sorted(name for name in changed if name in seen or name.startswith(_LOADED))
    if late:
        return f"{', '.join(late)} was read before the server changed it"
    is_this = path == prefix[0] or numa.bind(numa.options(path, prefix[0]))
    if not is_this or arguments[1 : len(prefix)] != prefix[1:]:
        return f"the command is {path}, and this is {prefix[0]}"
    return ""
