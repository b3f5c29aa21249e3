"""A laptop without memory: its kernel kills a process, and the pod says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice_operator.cluster.local import pod
from sluice_operator.cluster.local.pod import LocalContainer, times_out_of_memory


def test_the_kernel_counts_what_it_killed(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 17\noom_kill 4\nworkingset_nodes 0\n")
    assert times_out_of_memory(vmstat) == 4
    vmstat.write_text("nr_free_pages 17\n")  # kernels before 4.13
    assert times_out_of_memory(vmstat) == 0
    assert times_out_of_memory() >= 0  # this machine's


@pytest.mark.parametrize(
    ("code", "since", "reason"),
    [(-9, 1, "SystemOOM"), (-9, 0, "Error"), (1, 1, "Error"), (0, 1, "Completed")],
    ids=["killed for memory", "killed by somebody", "ended by itself", "done"],
)
def test_a_container_that_the_kernel_killed(
    code: int, since: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = LocalContainer("trainer", tmp_path / "log", out_of_memory=4)
    monkeypatch.setattr(pod, "times_out_of_memory", lambda: 4 + since)
    container.end(code)
    assert container.reason == reason
