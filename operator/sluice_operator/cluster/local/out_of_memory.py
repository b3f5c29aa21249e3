"""Traces of the kernel's out-of-memory killer, which ends processes with SIGKILL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS, KERNEL_LOG = Path("/proc"), Path("/sys/fs/cgroup"), Path("/dev/kmsg")
# Larger than any record: a read with less room fails.
_RECORD_BYTES = 8192


def kills() -> tuple[int, ...]:
    """Return counters of which at least one grows when the kernel kills a process for memory.

    They are the counter of this machine, the counter of this process's cgroup (the limit of a
    container), and the number of the newest such record in the kernel's log. A counter that cannot
    be read is 0.
    """
    machine = counter(_text(PROC / "vmstat"), "oom_kill")
    cgroup = sum(counter(_text(file), "oom_kill") for file in cgroup_files())
    logged = max((number for number, _ in kill_records(_kernel_log())), default=0)
    return machine, cgroup, logged


def counter(text: str, name: str) -> int:
    """Return the counter of a name from lines of `name value`; 0 if there is none."""
    match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def cgroup_files() -> list[Path]:
    """Return the files with the counters of this process's memory cgroup, of version 2 or 1."""
    memberships = [line.split(":", 2) for line in _text(PROC / "self/cgroup").splitlines()]
    files = []
    for _, controllers, path in memberships:
        if not controllers:
            files.append(CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def kill_records(records: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the records of /dev/kmsg about killed processes."""
    for record in records:
        head, _, text = record.partition(";")
        if "Killed process" in text:
            yield int(head.split(",")[1]), text.splitlines()[0]


def _kernel_log() -> list[str]:
    try:
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        # Only root may read it, and containers often lack it.
        return []
    records = []
    try:
        while True:
            try:
                records.append(os.read(log, _RECORD_BYTES).decode(errors="replace"))
            except BrokenPipeError:
                # This record was overwritten; the next read continues after it.
                continue
            except OSError:
                # The end of the log (EAGAIN), or a log that cannot be read like this.
                return records
            if not records[-1]:
                return records
    finally:
        os.close(log)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        # This container or kernel does not have the file.
        return ""
