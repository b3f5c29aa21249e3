"""User, network, mount and IPC namespaces for a program. Standard library only.

It has no network but an unconnected one, and no IPC objects of others. Its directory is in memory,
with a size; /proc is empty; from Linux 5.12 on everything else is read-only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_NEW = 0x10000000 | 0x40000000 | 0x00020000 | 0x08000000  # CLONE_NEW: user, network, mount, IPC
_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4  # MS_* of mount and MOUNT_ATTR_* of mount_setattr
_PRIVATE = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
_MOUNT_SETATTR, _HERE, _RECURSIVE = 442, -100, 0x8000  # the number is the same on every machine


def enter(directory: str, *, size: int, entries: int) -> None:
    """Enter new namespaces, with `directory` as the only place to write to. Raises OSError.

    size: bytes in the directory. entries: files and directories in it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(_NEW), "unshare")
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
            libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, attributes, size), "mount_setattr"
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
