"""Give up rights before running an untrusted program. Standard library only.

Layers: a separate user, namespaces, Landlock (files), seccomp (system calls), resource limits. All
but the last two may be missing on a machine. `probe` finds out once which layers work; `confine`
applies exactly these, and fails if one no longer works.
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
# Ranges of uids, (first, count). Neither users nor containers get the high one (systemd's list
# of uids). A pod with a user namespace only has 65,536 users.
_HIGH_UIDS, _LOW_UIDS = (0x70000000, 1 << 27), (60_001, 500)
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7}

# CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC
_NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x00020000 | 0x08000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4  # MS_* of mount and MOUNT_ATTR_* of mount_setattr
_PRIVATE = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
_MOUNT_SETATTR, _AT_FDCWD, _RECURSIVE = 442, -100, 0x8000  # the number is the same on every machine


@dataclass(frozen=True, slots=True)
class Limits:
    """Address space in bytes and processor time in seconds."""

    memory: int
    cpu_seconds: int


@dataclass(frozen=True, slots=True)
class Rights:
    """Exceptions from the confinement.

    Attributes
    ----------
    programs
        Allow other programs, which are confined in the same way.
    readable
        Files and directories that these programs may read and run.
    processes
        Processes that the current user already has. The kernel counts them together with the
        program's if it runs as the same user.

    """

    programs: bool = False
    readable: tuple[str, ...] = ()
    processes: int = 0


_NONE = Rights()


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that confine programs on this machine.

    Attributes
    ----------
    uid
        User of the program; None if it runs as the current user.
    namespaces, landlock
        True if the layer works.
    missing
        Cause by name of a missing layer.
    refused
        Why programs must not run on this machine; "" if they may.

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
    """Try every layer in a forked process, with the empty `directory`.

    If other programs are allowed, two limits are mandatory: a confined place to write to, and a
    number of processes that the kernel enforces, which it does for every user but root.
    """
    _python()  # cached now, because another user may not be able to read the paths
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
    """Return why other programs may not be started with these layers, or ""."""
    if layers.uid is None and os.geteuid() == 0:
        return (
            "no separate user, and the kernel does not limit the processes of root: "
            f"{missing['uid']}"
        )
    if not (layers.namespaces or layers.landlock):
        reasons = "; ".join(f"{name}: {missing[name]}" for name in ("namespaces", "landlock"))
        return f"no layer confines what programs write ({reasons})"
    return ""


def confine(
    directory: str, limits: Limits, layers: Layers, parent: int, rights: Rights = _NONE
) -> None:
    """Confine this process, for good, to reading Python's files and writing in `directory`.

    Parameters
    ----------
    directory
        The only writable directory.
    limits
        Resource limits.
    layers
        Layers to apply, from `probe`.
    parent
        Pid of the parent, which this process must not outlive.
    rights
        Exceptions.

    Raises
    ------
    OSError
        If a layer does not work.

    """
    _enter(directory, layers, rights)
    _limit(limits, layers, rights)
    _keep_apart(parent)
    seccomp.install(programs=rights.programs)


def hide() -> None:
    """Hide memory, environment and descriptors of this process from others of the same user."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


# --- the layers


def _with(layers: Layers, name: str) -> list[Layers]:
    """Return the layers plus one more, in each variant worth trying."""
    match name:
        case "uid":
            return [replace(layers, uid=uid) for uid in _candidate_uids()]
        case "namespaces":
            return [replace(layers, namespaces=True)]
        case _:
            return [replace(layers, landlock=True)]


def _try(directory: str, layers: Layers, rights: Rights) -> None:
    """Enter the layers.

    Raises OSError if one does not work, or takes away what programs import.
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
    )  # gives access to this process's files in /proc until _keep_apart
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills this process first
    if layers.namespaces:
        _enter_namespaces(directory, size=DIRECTORY_BYTES, entries=DIRECTORY_ENTRIES)
    os.chdir(directory)
    _drop_capabilities(libc)
    seccomp.forbid_new_privileges()
    if layers.landlock:
        readable = [*_SYSTEM, *rights.readable] if rights.programs else _python()
        landlock.restrict([*readable, *_DEVICES], [directory, "/dev/null"])


# --- a separate user: it does not own the pod's files, and the kernel counts its threads and pipes
# separately


def _candidate_uids() -> list[int]:
    """Return uids to try, random because the kernel counts a user's threads over the whole node."""
    return [first + secrets.randbelow(size) for first, size in (_HIGH_UIDS, _LOW_UIDS)]


def _require_capabilities() -> None:
    """Raise OSError unless this process can run and kill programs of another user."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("CapEff:"))
    held = int(line.split()[1], 16)
    if lacking := [f"CAP_{name}" for name, bit in _CAPABILITIES.items() if not held >> bit & 1]:
        raise OSError(errno.EPERM, f"this process lacks {', '.join(lacking)}")


def _become(uid: int) -> None:
    """Switch to this user and its group for good. Raises OSError."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _require_readable(paths: Iterable[str]) -> None:
    """Raise OSError if an existing path is not readable by this user."""
    for path in paths:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            continue
        if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


# --- namespaces


def _enter_namespaces(directory: str, *, size: int, entries: int) -> None:
    """Enter user, network, mount and IPC namespaces, with `directory` as the only writable place.

    The network is unconnected, `directory` is in memory with a size limit, /proc is empty, and from
    Linux 5.12 on everything else is read-only. Raises OSError.

    Parameters
    ----------
    directory
        Place to write to.
    size
        Its limit in bytes.
    entries
        Its limit of files and directories.

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
        ):  # before Linux 5.12 only file permissions and Landlock protect files
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
    ):  # counted by user over the whole node, so only useful for a separate user
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
    """Die with the parent, and forbid inspection by other processes.

    A change of user resets both, so this comes after it.
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
    """Return the paths of Python, its libraries and the system's shared libraries."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.join(base, "lib") for base in (sys.prefix, sys.base_prefix)}
    return sorted(
        {
            *filter(None, paths),
            *_SYSTEM,
        }
    )


def _attempt(action: Callable[[], None]) -> str:
    """Run `action` in a forked process and return why it fails; "" if it does not."""
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
