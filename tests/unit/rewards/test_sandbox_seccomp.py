"""The verdicts of the seccomp filter: its BPF, interpreted as the kernel would, for machines that
are not here, too."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from sluice.rewards.sandbox import seccomp
from sluice.rewards.sandbox.syscalls import ABSENT, DENIED, FIRST_UNKNOWN, PROGRAMS

ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028

NUMBERS = {
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "openat": (257, 56),
    "mknodat": (259, 33),
    "clone": (56, 220),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
    "read": (0, 63),
    "futex": (202, 98),
    "mmap": (9, 222),
    "ftruncate": (77, 46),
    "getrandom": (318, 278),
    "close_range": (436, 436),
}


def verdict(
    machine: str,
    number: int,
    *arguments: int,
    architecture: int | None = None,
    programs: bool = False,
) -> int:
    """The filter's answer to a call."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *padded)
    code = list(struct.iter_unpack("<HBBI", seccomp.build(machine, programs=programs)))
    accumulator, at = 0, 0
    while True:
        operation, holds, fails, operand = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                at += holds if accumulator == operand else fails
            case 0x35:
                at += holds if accumulator >= operand else fails
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"no such operation: {operation:#x}")


def call(machine: str, name: str, *arguments: int) -> int:
    number = NUMBERS[name][list(ARCHITECTURES).index(machine)]
    return verdict(machine, number, *arguments)


on_both = pytest.mark.parametrize("machine", ARCHITECTURES)


@on_both
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("read", (0,), ALLOW),
        ("futex", (0,), ALLOW),
        ("mmap", (0, 4096, 7), ALLOW),
        ("ftruncate", (3, 0), ALLOW),
        ("getrandom", (0,), ALLOW),
        ("close_range", (3, 9), ALLOW),
        ("fcntl", (0, 3), ALLOW),  # F_GETFL
        ("fcntl", (0, 1030, 5), ALLOW),  # F_DUPFD_CLOEXEC
        ("fcntl", (0, 8, 1), REFUSE),  # F_SETOWN
        ("fcntl", (0, 10, 9), REFUSE),  # F_SETSIG
        ("fcntl", (0, 15), REFUSE),  # F_SETOWN_EX
        ("fcntl", (0, 1024), REFUSE),  # F_SETLEASE
        ("fcntl", (0, 8 | 1 << 32), REFUSE),  # the kernel reads the low half
        ("ioctl", (0, 0x5401), ALLOW),  # TCGETS
        ("ioctl", (0, 0x8901), REFUSE),  # FIOSETOWN
        ("ioctl", (0, 0x8902), REFUSE),  # SIOCSPGRP
        ("ioctl", (0, 0x5412), REFUSE),  # TIOCSTI
        ("openat", (0, 0, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), ALLOW),
        ("openat", (0, 0, os.O_RDWR | os.O_TRUNC), ALLOW),
        ("openat", (0, 0, os.O_RDONLY), ALLOW),
        ("openat", (0, 0, os.O_RDONLY | os.O_TRUNC), REFUSE),
        ("openat", (0, 0, os.O_ACCMODE), REFUSE),
        ("openat", (0, 0, os.O_ACCMODE | os.O_TRUNC), REFUSE),
        ("openat", (0, 0, os.O_WRONLY | os.O_CREAT, 0o4755), REFUSE),
        ("openat", (0, 0, os.O_WRONLY | os.O_CREAT, 0o2755), REFUSE),
        ("mknodat", (0, 0, 0o010644), ALLOW),  # a FIFO
        ("mknodat", (0, 0, 0o104755), REFUSE),
        ("clone", (0x003D0F00,), ALLOW),  # a thread
        ("clone", (17,), REFUSE),  # a fork
        ("prlimit64", (0, 0), ALLOW),
        ("prlimit64", (7, 0), REFUSE),
        ("socketpair", (1, 1 | 0o2000000), ALLOW),  # a stream, closed on exec
        ("socketpair", (1, 2), REFUSE),  # datagrams
        ("socketpair", (30, 1), REFUSE),  # AF_TIPC
    ],
    ids=str,
)
def test_verdicts_that_depend_on_arguments(
    machine: str, name: str, arguments: tuple[int, ...], expected: int
) -> None:
    assert call(machine, name, *arguments) == expected


@on_both
def test_denied_and_absent_calls(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    for calls, expected in ((DENIED, REFUSE), (ABSENT, UNKNOWN)):
        for name, numbers in calls.items():
            if (number := numbers[column]) is not None:
                assert verdict(machine, number) == expected, name


@on_both
def test_other_programs_may_be_started_if_requested(machine: str) -> None:
    """No other calls are allowed in addition: no network, no namespaces, no signals."""
    column = list(ARCHITECTURES).index(machine)
    for name, numbers in DENIED.items():
        if (number := numbers[column]) is not None:
            expected = ALLOW if name in PROGRAMS else REFUSE
            assert verdict(machine, number, programs=True) == expected, name
    clone = NUMBERS["clone"][column]
    new_user, new_network, vfork = 0x10000000, 0x40000000, 0x4111
    for flags, expected in ((17, ALLOW), (vfork, ALLOW), (new_user | 17, REFUSE),
                            (new_network | 17, REFUSE)):  # fmt: skip
        assert verdict(machine, clone, flags, programs=True) == expected, hex(flags)


@on_both
def test_calls_newer_than_the_list_do_not_exist(machine: str) -> None:
    assert verdict(machine, FIRST_UNKNOWN - 1) == ALLOW
    for number in (FIRST_UNKNOWN, 452, 463, 469, 999):  # fchmodat2, setxattrat, file_setattr
        assert verdict(machine, number) == UNKNOWN


def test_calls_of_another_table_end_the_program() -> None:
    assert verdict("x86_64", 0, architecture=I386) == KILL
    assert verdict("x86_64", 0x40000000) == KILL  # x32
    assert verdict("x86_64", 0xFFFFFFFF) == KILL
    assert verdict("aarch64", 0, architecture=ARM) == KILL
    assert verdict("aarch64", 63, architecture=ARCHITECTURES["x86_64"]) == KILL


def test_a_machine_without_known_numbers_is_refused() -> None:
    with pytest.raises(OSError, match="no seccomp filter for riscv64"):
        seccomp.build("riscv64")


@pytest.mark.parametrize(
    ("header", "column"),
    [("x86_64-linux-gnu/asm/unistd_64.h", 0), ("asm-generic/unistd.h", 1)],
    ids=ARCHITECTURES,
)
def test_the_numbers_are_those_of_the_kernels_headers(header: str, column: int) -> None:
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip(f"{path} is not here")
    kernel = dict(re.findall(r"#define __NR3?2?6?4?_?(\w+)\s+(\d+)\b", path.read_text()))
    for name, numbers in (DENIED | ABSENT | NUMBERS).items():
        if name in kernel or numbers[column] is None:
            expected = int(kernel[name]) if name in kernel else None
            assert numbers[column] == expected, name
