"""Traces of the kernel's out-of-memory killer, which ends a process with SIGKILL and tells it
nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS, KERNEL_LOG = Path("/proc"), Path("/sys/fs/cgroup"), Path("/dev/kmsg")
# Larger than any record: a read with less room fails.
_RECORD_BYTES = 8192


def kills() -> tuple[int, ...]:
    """Counters of which at least one grows when the kernel kills a process for memory.

    That of this machine, that of the cgroup of this process (a container's limit), and the number
    of the newest such record of the kernel's log. One that cannot be read here is 0.
    """
    machine = counter(_text(PROC / "vmstat"), "oom_kill")
    cgroup = sum(counter(_text(file), "oom_kill") for file in cgroup_files())
    logged = max((number for number, _ in kill_records(_kernel_log())), default=0)
    return machine, cgroup, logged


def counter(text: str, name: str) -> int:
    """The counter of a name in lines of `name value`; 0 if there is none."""
    match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def cgroup_files() -> list[Path]:
    """Files in which the memory cgroup of this process counts, of version 2 or 1."""
    memberships = [line.split(":", 2) for line in _text(PROC / "self/cgroup").splitlines()]
    files = []
    for _, controllers, path in memberships:
        if not controllers:
            files.append(CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def kill_records(records: list[str]) -> Iterator[tuple[int, str]]:
    """(number, text) of records of /dev/kmsg that tell of a killed process."""
    for record in records:
        head, _, text = record.partition(";")
        if "Killed process" in text:
            yield int(head.split(",")[1]), text.splitlines()[0]


def _kernel_log() -> list[str]:
    try:
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # only root may read it, or a container has none
        return []
    records = []
    try:
        while True:
            try:
                records.append(os.read(log, _RECORD_BYTES).decode(errors="replace"))
            except BrokenPipeError:  # this record was overwritten; the next read goes on behind it
                continue
            except OSError:  # the end (EAGAIN), or no log that can be read so
                return records
            if not records[-1]:
                return records
    finally:
        os.close(log)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not in this container, or of a kernel without it
        return ""
