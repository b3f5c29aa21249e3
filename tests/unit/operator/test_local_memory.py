"""A laptop without memory: its kernel kills a process, and the pod says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice_operator.cluster.local import out_of_memory
from sluice_operator.cluster.local.pod import LocalContainer

RECORDS = [
    "6,1440,3107,-;EXT4-fs (vda): mounted filesystem\n",
    "3,1441,5207,-;Out of memory: Killed process 4711 (python3) total-vm:1kB\n SUBSYSTEM=x\n",
    "6,1442,6107,-;oom_reaper: reaped process 4711 (python3)\n",
]


def test_a_kernel_counts_what_it_killed() -> None:
    assert out_of_memory.counter("nr_free_pages 17\noom_kill 4\nfull 1\n", "oom_kill") == 4
    assert out_of_memory.counter("oom_kill_disable 0\nunder_oom 0\noom_kill 2", "oom_kill") == 2
    assert out_of_memory.counter("oom 3\n", "oom_kill") == 0, "kernels before 4.13"


def test_a_kernels_log_names_what_it_killed() -> None:
    [(number, text)] = out_of_memory.kill_records(RECORDS)
    assert number == 1441
    assert text == "Out of memory: Killed process 4711 (python3) total-vm:1kB"


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/system.slice/a.service\n", "system.slice/a.service/memory.events"),
        ("0::/\n", "memory.events"),
        ("5:cpu:/x\n4:memory:/jobs/a\n0::/\n", "memory/jobs/a/memory.oom_control"),
    ],
    ids=["version 2", "in a container", "version 1"],
)
def test_the_counts_of_a_cgroup_are_looked_up(
    membership: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(membership)
    monkeypatch.setattr(out_of_memory, "PROC", tmp_path)
    assert out_of_memory.CGROUPS / file in out_of_memory.cgroup_files()


def test_what_a_machine_does_not_show_counts_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PROC", "CGROUPS", "KERNEL_LOG"):
        monkeypatch.setattr(out_of_memory, name, tmp_path / "none")
    assert out_of_memory.kills() == (0, 0, 0)


def test_the_counts_of_this_machine_are_read() -> None:
    assert all(count >= 0 for count in out_of_memory.kills())


@pytest.mark.parametrize(
    ("code", "now", "reason"),
    [
        (-9, (5, 0, 0), "SystemOOM"),
        (-9, (4, 1, 0), "SystemOOM"),
        (-9, (4, 0, 7), "SystemOOM"),
        (-9, (4, 0, 0), "Error"),
        (1, (5, 0, 0), "Error"),
        (0, (5, 0, 0), "Completed"),
    ],
    ids=[
        "killed for the machine's memory",
        "killed for a container's limit",
        "killed by the kernel's log",
        "killed by somebody",
        "ended by itself",
        "done",
    ],
)
def test_a_container_that_the_kernel_killed(
    code: int,
    now: tuple[int, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    container = LocalContainer("trainer", tmp_path / "log", kills_before=(4, 0, 0))
    monkeypatch.setattr(out_of_memory, "kills", lambda: now)
    container.end(code)
    assert container.reason == reason
