"""A seccomp filter for processes that run untrusted programs. Standard library only.

The filter denies what a program needs to reach beyond itself: sockets, new processes (threads are
allowed), other programs, signals to others, tracing, mounts and namespaces, changes of owners,
modes and times of files, kernel interfaces that bypass a filter (io_uring, bpf), and every call
newer than its list. It needs no privileges and works in containers. Numbers come from the kernel's
syscall tables (`syscalls`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

from sluice.rewards.sandbox.syscalls import (
    ABSENT,
    CHECKED,
    CLONE_PROCESSES,
    CLONE_THREADS,
    DENIED,
    FIRST_UNKNOWN,
    PROGRAMS,
    ArgumentCheck,
)

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000

# BPF: load a word, bitwise and, jump if equal, jump if at least, return
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2

# (operation, instructions to skip if it holds, if it does not, operand).
Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(*, programs: bool = False) -> None:
    """Install the filter in this process, for good.

    Parameters
    ----------
    programs
        Allow other programs; the filter applies to them too.

    Raises
    ------
    OSError
        If the kernel or the machine has no seccomp.

    """
    forbid_new_privileges()
    apply(build(platform.machine(), programs=programs))


def forbid_new_privileges() -> None:
    """Set no_new_privs, which seccomp and Landlock require from unprivileged processes.

    Raises OSError.
    """
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1, 0)


def apply(program: bytes) -> None:
    """Install a BPF program as this process's filter. Raises OSError."""
    _prctl("seccomp", _PR_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(program) // 8, program)))


def _prctl(layer: str, *arguments: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"{layer}: {os.strerror(number)}")


def build(machine: str, *, programs: bool = False) -> bytes:
    """Return the filter as BPF. Raises OSError for a machine whose syscall numbers are unknown.

    `programs` as in `install`.
    """
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {machine}")
    column, architecture = _MACHINES[machine]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the same calls under other numbers
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    code += [(_AT_LEAST, 0, 1, FIRST_UNKNOWN), _refuse(errno.ENOSYS)]
    code += _without(ABSENT.values(), column, errno.ENOSYS)
    denied = (call for name, call in DENIED.items() if not programs or name not in PROGRAMS)
    code += _without(denied, column, errno.EPERM)
    for check in (*CHECKED, CLONE_PROCESSES if programs else CLONE_THREADS):
        if (number := check.call[column]) is not None:
            code += _checked(number, check)
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _refuse(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _without(
    calls: Iterable[tuple[int | None, int | None]], column: int, error: int
) -> list[Instruction]:
    code = []
    for call in calls:
        if (number := call[column]) is not None:
            code += [(_EQUAL, 0, 1, number), _refuse(error)]
    return code


def _checked(number: int, check: ArgumentCheck) -> list[Instruction]:
    """Return instructions that refuse a call unless its argument is allowed.

    They fall through for other calls and for allowed arguments.
    """
    inside: list[Instruction] = []
    for mask, value in reversed(
        check.values
    ):  # built from the end: a jump skips the instructions after it
        matches = (_EQUAL, len(inside) + 1, 0, value) if check.only else (_EQUAL, 0, 1, value)
        refusal = [] if check.only else [_refuse(errno.EPERM)]
        inside = [
            (_LOAD, 0, 0, _ARGUMENTS + 8 * check.argument),
            (_AND, 0, 0, mask),
            matches,
            *refusal,
            *inside,
        ]
    inside += [_refuse(errno.EPERM)] if check.only else []
    return [(_EQUAL, 0, len(inside), number), *inside, (_LOAD, 0, 0, _NUMBER)]
