"""benchmarks/reasoning.py: its table, and which GPUs a run gets."""

from __future__ import annotations

from typing import Any

from benchmarks.reasoning import Gpus
from benchmarks.reasoning_table import Run, over_seeds, report


def run(reward: float, seconds: list[float]) -> Run:
    steps: dict[int, dict[str, Any]] = {
        step: {"rollout/raw_reward": reward, "perf/step_time": second}
        for step, second in enumerate(seconds, 1)
    }
    return Run(steps, [(0, reward / 2), (len(steps), reward)])


def test_seconds_are_medians_without_the_first_steps() -> None:
    slow_start = [99.0, 99.0, 99.0, 2.0, 1.0, 3.0]
    assert over_seeds([run(0.5, slow_start)], "perf/step_time", 1, 10) == "2.000"


def test_a_table_has_a_row_for_ten_steps_and_what_was_held_out() -> None:
    table = report("sums", [run(0.2, [1.0] * 12), run(0.4, [1.0] * 5), Run({}, [])])
    assert "2 seed(s)" in table
    assert "12, 5 steps" in table
    rows = [line.split(" | ")[:2] for line in table.splitlines() if line.startswith("| 1")]
    assert rows == [["| 1-10", "0.300 ± 0.141"], ["| 11-20", "0.200"]]
    assert "held out before (step 0, 0): 0.150 ± 0.071" in table
    assert "held out after (step 12, 5): 0.300 ± 0.141" in table


def test_runs_get_the_gpus_that_fewest_others_use() -> None:
    gpus = Gpus(["4", "5"], runs_per_gpu=2)
    with gpus.held(1) as first, gpus.held(1) as second, gpus.held(2) as both:
        assert (first, second, sorted(both)) == (["4"], ["5"], ["4", "5"])
    with gpus.held(2) as again:
        assert sorted(again) == ["4", "5"]
