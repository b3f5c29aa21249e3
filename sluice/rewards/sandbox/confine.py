"""What a process gives up before it runs a program that nobody has read. Standard library only.

Four layers, each of which may be missing on some machine: namespaces (no network, no mounts of others; often forbidden
in containers), landlock (files), seccomp (sockets, processes, signals), resource limits. `confine` says which it had;
without seccomp it refuses, since then nothing may stand between the program and the network.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
import sysconfig
from dataclasses import dataclass

from sluice.rewards.sandbox import landlock, seccomp

FILE_BYTES = 16 << 20
FILES = 64
DIRECTORY_BYTES = 64 << 20
STACK_BYTES = 256 << 20

_NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x00020000 | 0x08000000  # user, network, mount, IPC
_PRIVATE = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
_TMPFS_FLAGS = 2 | 4  # MS_NOSUID | MS_NODEV
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 38, 9
_CAPABILITY_VERSION_3 = 0x20080522
_DEVICES = ("/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True, slots=True)
class Limits:
    """memory: bytes of address space. cpu_seconds: processor time."""

    memory: int
    cpu_seconds: int


def confine(directory: str, limits: Limits) -> list[str]:
    """Confine this process to reading Python's own files and writing in `directory`, its own.

    Returns the layers that hold. Raises OSError where seccomp does not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    layers = ["namespaces"] if _namespaces(libc, directory) else []
    os.chdir(directory)
    _limit(limits)
    _drop_capabilities(libc)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        landlock.restrict([*_python(), *_DEVICES], [directory, "/dev/null"])
        layers.append("landlock")
    except OSError:
        pass  # an older kernel: file permissions are all there is, and whoever asks is told
    seccomp.install()
    return [*layers, "seccomp"]


def _namespaces(libc: ctypes.CDLL, directory: str) -> bool:
    """No network but an own, unconnected one; the directory in memory, with a size. False where that is forbidden."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_NAMESPACES):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    options = f"size={DIRECTORY_BYTES},nr_inodes=4096,mode=700".encode()
    libc.mount(None, b"/", None, _PRIVATE, None)
    libc.mount(b"tmpfs", directory.encode(), b"tmpfs", _TMPFS_FLAGS, options)
    return True


def _limit(limits: Limits) -> None:
    for what, value in (
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        room = 1 if what == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else 0  # SIGXCPU before SIGKILL
        resource.setrlimit(what, (value, value + room))


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header, none = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    libc.capset(header, none)


def _python() -> list[str]:
    """Where Python, its libraries and the system's shared libraries are."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.join(base, "lib") for base in (sys.prefix, sys.base_prefix)}
    return sorted(
        {*filter(None, paths), "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"}
    )
