"""The rights that a process gives up before it runs a program that nobody has read. Standard
library only.

Layers, of which all but the last two may be missing on some machine: a user of the program's own
(`account`), namespaces, Landlock (files), seccomp (calls), resource limits. `probe` finds out once
which of them hold here; `confine` applies exactly these, and fails where one no longer does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import secrets
import stat
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial

from sluice.rewards.sandbox import landlock, seccomp

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
_HIGH = (
    0x70000000,
    1 << 27,
)  # (first, how many): nobody gives these to users or containers (systemd's list of uids)
_LOW = (60_001, 500)  # in a pod of a user namespace of its own there are 65,536 users
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7}

_NEW_NAMESPACES = (
    0x10000000 | 0x40000000 | 0x00020000 | 0x08000000
)  # CLONE_NEW: user, network, mount, IPC
_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4  # MS_* of mount and MOUNT_ATTR_* of mount_setattr
_PRIVATE = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
_MOUNT_SETATTR, _AT_FDCWD, _RECURSIVE = 442, -100, 0x8000  # the number is the same on every machine


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
            return [replace(layers, uid=uid) for uid in _candidate_uids()]
        case "namespaces":
            return [replace(layers, namespaces=True)]
        case _:
            return [replace(layers, landlock=True)]


def _try(directory: str, layers: Layers, rights: Rights) -> None:
    """Enter the layers.

    Raises OSError where one does not hold, or takes from programs what they import.
    """
    if layers.uid is not None:
        _require_capabilities()
    _enter(directory, layers, rights)
    if layers.uid is not None and not rights.programs:
        packages = sysconfig.get_path("purelib")
        _require_readable(_python())
        _require_readable(os.path.join(packages, name) for name in os.listdir(packages))


def _enter(directory: str, layers: Layers, rights: Rights = _NONE) -> None:
    if layers.uid is not None:
        os.chown(directory, layers.uid, layers.uid)
        _become(layers.uid)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(
        _PR_SET_DUMPABLE, 1, 0, 0, 0
    )  # else our own files in /proc are not ours; see _keep_apart
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out this process goes first; a courtesy, no layer
    if layers.namespaces:
        _enter_namespaces(directory, size=DIRECTORY_BYTES, entries=DIRECTORY_ENTRIES)
    os.chdir(directory)
    _drop_capabilities(libc)
    seccomp.forbid_new_privileges()
    if layers.landlock:
        own = [*_SYSTEM, *rights.readable] if rights.programs else _python()
        landlock.restrict([*own, *_DEVICES], [directory, "/dev/null"])


# --- a user of the program's own: the pod's files are a stranger's to it, and the kernel counts its
# threads and pipes alone


def _candidate_uids() -> list[int]:
    """Uids to try. They differ from sandbox to sandbox: the kernel counts a user's threads over the
    whole node.
    """
    return [first + secrets.randbelow(size) for first, size in (_HIGH, _LOW)]


def _require_capabilities() -> None:
    """Raises OSError where this process cannot run a program as another user, end it, or clean up
    after it.
    """
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("CapEff:"))
    held = int(line.split()[1], 16)
    if lacking := [f"CAP_{name}" for name, bit in _CAPABILITIES.items() if not held >> bit & 1]:
        raise OSError(errno.EPERM, f"this process lacks {', '.join(lacking)}")


def _become(uid: int) -> None:
    """Be this user, and no other, in this user's group, for good. Raises OSError."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _require_readable(paths: Iterable[str]) -> None:
    """Raises OSError where this user cannot read one of the paths; what does not exist aside."""
    for path in paths:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            continue
        if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


# --- namespaces


def _enter_namespaces(directory: str, *, size: int, entries: int) -> None:
    """Enter new namespaces, with `directory` as the only place to write to. Raises OSError.

    size: bytes in the directory. entries: files and directories in it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(_NEW_NAMESPACES), "unshare")
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _check(libc.mount(None, b"/", None, _PRIVATE, None), "mount /")
    _make_read_only(libc)
    flags = _NO_SETUID | _NO_DEVICES
    _check(
        libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags | _READ_ONLY, b"size=4096"), "mount /proc"
    )
    options = f"size={size},nr_inodes={entries},mode=700".encode()
    _check(libc.mount(b"tmpfs", directory.encode(), b"tmpfs", flags, options), f"mount {directory}")


def _make_read_only(libc: ctypes.CDLL) -> None:
    attributes = struct.pack("<QQQQ", _READ_ONLY | _NO_SETUID, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    try:
        _check(
            libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _RECURSIVE, attributes, size),
            "mount_setattr",
        )
    except OSError as error:
        if (
            error.errno != errno.ENOSYS
        ):  # before Linux 5.12 file permissions and Landlock stand alone
            raise


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


# --- the rest


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
