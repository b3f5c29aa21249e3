"""report.html tells of what looked sick, once, where it was first seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.telemetry import run_directory
from sluice.telemetry.report import write_report

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("ppo_kl", "warned"), [(0.4, 1), (0.0, 0)])
def test_a_report_has_the_warnings_of_its_run(tmp_path: Path, ppo_kl: float, warned: int) -> None:
    for step in (1, 2, 3):
        run_directory.append(
            tmp_path / run_directory.METRICS, {"step": step, "rollout/raw_reward": 0.5, "train/ppo_kl": ppo_kl}
        )
    text = write_report(tmp_path, "job").read_text()
    assert text.count("<li>step 1: ppo_kl is 0.4: within one batch") == warned
    assert ("<h2>Warnings</h2>" in text) == bool(warned)
