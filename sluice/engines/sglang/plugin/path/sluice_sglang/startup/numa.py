"""Binds a running process to a NUMA node, as `numactl` binds a command that it starts.

On a machine with several nodes SGLang puts `numactl` before the process that generates, in a script
that takes Python's place (`numa_utils.py`).
"""

import ctypes
import os
import platform
import re
from pathlib import Path

_SCRIPT = re.compile(r'#!/bin/sh\nexec numactl (?P<options>[^\n]*?) ?(?P<command>\S+) "\$@"\n?')
_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
# Numbers of MPOL_BIND and MPOL_PREFERRED.
_POLICIES = {"--membind": 2, "--preferred": 1}
_PROCESSORS = ("--physcpubind", "--cpunodebind")


def options(path: str, python: str) -> list[str]:
    """Return numactl's options in a script that starts this Python; empty if it is another file."""
    try:
        script = _SCRIPT.fullmatch(Path(path).read_text())
    except (OSError, UnicodeDecodeError):
        return []
    return script["options"].split() if script and script["command"] == python else []


def bind(chosen: list[str]) -> bool:
    """Bind all threads to processors, and later allocations of this thread to a node.

    Memory that is allocated already is not moved. Returns False if the options are unknown or not
    permitted.
    """
    values = dict(option.partition("=")[::2] for option in chosen)
    if not all(
        name in (*_POLICIES, *_PROCESSORS) and value.replace(",", "").isdecimal()
        for name, value in values.items()
    ):
        return False
    processors = set(map(int, filter(None, values.get("--physcpubind", "").split(","))))
    if node := values.get("--cpunodebind"):
        processors |= processors_of(int(node))
    if not processors:
        return False
    for name, policy in _POLICIES.items():
        if (node := values.get(name)) and not allocate_at(int(node), policy):
            return False
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), processors)
    return True


def allocate_at(node: int, policy: int) -> bool:
    """Allocate memory from a node. Returns False if that is not permitted."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or node > 63:
        return False
    mask = ctypes.c_ulong(1 << node)
    done: int = ctypes.CDLL(None).syscall(number, policy, ctypes.byref(mask), 65)
    return done == 0


def processors_of(node: int) -> set[int]:
    """Return a node's processors, which the kernel lists as 0-3,8."""
    ranges = (_NODES / f"node{node}/cpulist").read_text().strip().split(",")
    ends = [text.partition("-")[::2] for text in ranges if text]
    return {number for first, last in ends for number in range(int(first), int(last or first) + 1)}
