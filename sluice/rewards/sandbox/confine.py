"""The rights that a process gives up before it runs a program that nobody has read. Standard
library only.

Layers, of which all but the last two may be missing on some machine: a user of the program's own
(`account`), namespaces, Landlock (files), seccomp (calls), resource limits. `probe` finds out once
which of them hold here; `confine` applies exactly these, and fails where one no longer does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

from sluice.rewards.sandbox import account, landlock, namespaces, seccomp

FILE_BYTES = 16 << 20
OPEN_FILES = 64
THREADS = 256
DIRECTORY_BYTES = 64 << 20
DIRECTORY_ENTRIES = 4096
STACK_BYTES = 256 << 20

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _SIGKILL = 1, 4, 9
_CAPABILITY_VERSION_3 = 0x20080522
_SUCCESS = b"\0"
_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache",
)  # fmt: skip
_DEVICES = ("/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True, slots=True)
class Limits:
    """memory: bytes of address space. cpu_seconds: processor time."""

    memory: int
    cpu_seconds: int


@dataclass(frozen=True, slots=True)
class Rights:
    """Exceptions for a process: what it may do besides.

    programs: it may start other programs, which are confined as it is. readable: files and
    directories that they may read, and run. processes: those that our own user has anyway, and
    that count with theirs where they run as that user.
    """

    programs: bool = False
    readable: tuple[str, ...] = ()
    processes: int = 0


_NONE = Rights()


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that confine programs on this machine.

    uid: the program's own user; None: it runs as ours. missing: layer -> why this machine does not
    have it. refused: why programs must not run here at all; "" where they may.
    """

    uid: int | None = None
    namespaces: bool = False
    landlock: bool = False
    missing: dict[str, str] = field(default_factory=dict)
    refused: str = ""

    @property
    def names(self) -> list[str]:
        held = {
            "uid": self.uid is not None,
            "namespaces": self.namespaces,
            "landlock": self.landlock,
        }
        return [*(name for name, holds in held.items() if holds), "seccomp"]


def probe(directory: str, rights: Rights = _NONE) -> Layers:
    """Try every layer, each in a process of its own; `directory`: an empty one to try them with.

    With other programs, what limits them is no choice: a place to write in, and a number of
    processes that the kernel counts, which it does for everybody but root.
    """
    _python()  # read now: another user may not be able to
    layers, missing = Layers(), dict[str, str]()
    for name in ("uid", "namespaces", "landlock"):
        for more in _with(layers, name):
            if reason := _attempt(partial(_try, directory, more, rights)):
                missing[name] = reason
            else:
                layers = more
                missing.pop(name, None)
                break
    attempt = partial(confine, directory, Limits(1 << 32, 10), layers, os.getpid(), rights)
    refused = _attempt(attempt) or (_unlimited(layers, missing) if rights.programs else "")
    return replace(layers, missing=missing, refused=refused)


def _unlimited(layers: Layers, missing: dict[str, str]) -> str:
    """The layer without which no other programs may be started, or ""."""
    if layers.uid is None and os.geteuid() == 0:
        return f"no user of its own, and nothing counts the processes of root: {missing['uid']}"
    if not (layers.namespaces or layers.landlock):
        reasons = "; ".join(f"{name}: {missing[name]}" for name in ("namespaces", "landlock"))
        return f"nothing confines what programs write ({reasons})"
    return ""


def confine(
    directory: str, limits: Limits, layers: Layers, parent: int, rights: Rights = _NONE
) -> None:
    """Confine this process to reading Python's own files and writing in `directory`, for good.

    parent: the process that forked this one, which is not to outlive it. Raises OSError where a
    layer does not hold.
    """
    _enter(directory, layers, rights)
    _limit(limits, layers, rights)
    _keep_apart(parent)
    seccomp.install(programs=rights.programs)


def hide() -> None:
    """Keep this process's memory, environment and descriptors from others
    of the same user (in /proc).
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


# --- one layer after the other


def _with(layers: Layers, name: str) -> list[Layers]:
    """The same with one layer more, in the forms in which it may hold."""
    match name:
        case "uid":
            return [replace(layers, uid=uid) for uid in account.candidates()]
        case "namespaces":
            return [replace(layers, namespaces=True)]
        case _:
            return [replace(layers, landlock=True)]


def _try(directory: str, layers: Layers, rights: Rights) -> None:
    """Enter the layers.

    Raises OSError where one does not hold, or takes from programs what they import.
    """
    if layers.uid is not None:
        account.require_capabilities()
    _enter(directory, layers, rights)
    if layers.uid is not None and not rights.programs:
        packages = sysconfig.get_path("purelib")
        account.require_readable(_python())
        account.require_readable(os.path.join(packages, name) for name in os.listdir(packages))


def _enter(directory: str, layers: Layers, rights: Rights = _NONE) -> None:
    if layers.uid is not None:
        os.chown(directory, layers.uid, layers.uid)
        account.take(layers.uid)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(
        _PR_SET_DUMPABLE, 1, 0, 0, 0
    )  # else our own files in /proc are not ours; see _keep_apart
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out this process goes first; a courtesy, no layer
    if layers.namespaces:
        namespaces.enter(directory, size=DIRECTORY_BYTES, entries=DIRECTORY_ENTRIES)
    os.chdir(directory)
    _drop_capabilities(libc)
    seccomp.forbid_new_privileges()
    if layers.landlock:
        own = [*_SYSTEM, *rights.readable] if rights.programs else _python()
        landlock.restrict([*own, *_DEVICES], [directory, "/dev/null"])


def _limit(limits: Limits, layers: Layers, rights: Rights) -> None:
    values = {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    if (
        layers.uid is not None
    ):  # counted by user over the whole node: a limit for nobody but a user of one's own
        values[resource.RLIMIT_NPROC] = THREADS
    elif rights.programs:
        values[resource.RLIMIT_NPROC] = rights.processes + THREADS
    for what, value in values.items():
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        room = (
            1 if what == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else 0
        )  # SIGXCPU before SIGKILL
        resource.setrlimit(what, (value, value + room))


def _keep_apart(parent: int) -> None:
    """Die with the parent, and be no process that others may look into.

    A change of user would undo both.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if os.getppid() != parent:
        raise OSError("the sandbox's process is gone")


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header, none = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    libc.capset(header, none)


@cache
def _python() -> list[str]:
    """Where Python, its libraries and the system's shared libraries are."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.join(base, "lib") for base in (sys.prefix, sys.base_prefix)}
    return sorted(
        {
            *filter(None, paths),
            *_SYSTEM,
        }
    )


def _attempt(action: Callable[[], None]) -> str:
    """Why `action` fails in a process of its own; "" where it does not."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(write_end, _SUCCESS)
        except BaseException as error:
            os.write(write_end, (str(error) or type(error).__name__).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return "" if answer == _SUCCESS else answer.decode("utf-8", "replace") or "the attempt died"
