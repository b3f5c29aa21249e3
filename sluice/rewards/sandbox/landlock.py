"""Landlock: restrict the files that a process may access, without privileges.

Standard library only.

It needs Linux 5.13 with Landlock enabled. Structures and flags follow linux/landlock.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every machine
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _REFER = 1 << 14, 1 << 13
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NETWORK = 3  # bind and connect of TCP, since version 4
_SCOPES = 3  # abstract Unix sockets and signals, since version 6


def _call(*arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    return result


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process, for good, to these files and directories. It needs no_new_privs.

    Raises OSError.
    """
    version = _call(_CREATE, None, ctypes.c_size_t(0), _VERSION)
    handled = next(_ALL[v] for v in sorted(_ALL, reverse=True) if v <= version)
    attribute = struct.pack("<Q", handled)
    attribute += struct.pack("<Q", _NETWORK) if version >= 4 else b""
    attribute += struct.pack("<Q", _SCOPES) if version >= 6 else b""
    rules = _call(_CREATE, attribute, ctypes.c_size_t(len(attribute)), 0)
    try:
        for path in readable:
            _allow(rules, path, _READ & handled)
        for path in writable:
            _allow(rules, path, handled & ~_EXECUTE & ~_REFER)
        _call(_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # some systems lack some directories
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= _OF_FILES
            _call(_ADD, rules, _PATH_BENEATH, struct.pack("<Qi", rights, descriptor), 0)
        finally:
            os.close(descriptor)
