"""A run directory is readable whatever killed its writer."""

from __future__ import annotations

import json
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.telemetry import run_directory
from sluice.telemetry.group_accounting import Totals
from sluice.telemetry.report.timeline import spans
from sluice.telemetry.run_warnings import RunWarning
from sluice.telemetry.summary import evaluation_means, summarize
from sluice_cli.run.ending import warning_lines


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, reward in ((1, 0.1), (2, 0.2), (2, 0.3)):
        run_directory.append(path, {"step": step, "reward": reward})
    assert {s: r["reward"] for s, r in run_directory.by_step(path).items()} == {1: 0.1, 2: 0.3}


def test_a_line_that_a_kill_cut_off_is_skipped_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_directory.append(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    run_directory.append(path, {"step": 3})
    assert list(run_directory.by_step(path)) == [1, 3]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(run_directory.records(tmp_path / "none.jsonl")) == []


def test_json_is_replaced_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    run_directory.write_json(path, {"a": 1})
    run_directory.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


SPEC = RLJobSpec.model_validate(
    {
        "model": {"path": "m"},
        "data": {"prompts": [{"path": "p"}]},
        "reward": {"type": "f1"},
        "trainer": {"steps": 2},
    }
)


def test_summary(tmp_path: Path) -> None:
    for step, reward in ((1, 0.1), (2, 0.4)):
        run_directory.append(
            tmp_path / "metrics.jsonl",
            {
                "step": step,
                "rollout/raw_reward": reward,
                "train/train_rollout_logprob_abs_diff_max": step * 1e-6,
                "perf/step_time": 1.5,
            },
        )
    for part, seconds in (
        ("start", {"starting": 5.0, "waiting": 1.0}),
        ("start", {"starting": 2.0}),
        ("end", {"saving": 0.5}),
    ):
        run_directory.append(tmp_path / run_directory.SECONDS, {"part": part, "seconds": seconds})
    for version, dataset, reward in (
        (0, "a", 0.0),
        (0, "b", 0.2),
        (2, "a", 1.0),
        (2, "b", 0.5),
        (2, "b", 0.6),
    ):
        run_directory.append(
            tmp_path / "evaluation.jsonl",
            {"version": version, "dataset": dataset, f"eval/{dataset}": reward},
        )
    assert evaluation_means(tmp_path) == [(0, 0.1), (2, 0.8)]
    summary = summarize(
        tmp_path,
        state="Succeeded",
        restarts=1,
        wall_seconds=9.99,
        totals=Totals({"groups_leased": 4, "groups_trained": 4, "samples_trained": 8}, {}),
        device_seconds={"trainer/training": 3.0, "trainer/waiting": 1.0},
        spec=SPEC,
    )
    assert summary["goodput"] == 0.75
    assert summary["trainer_seconds"] == {"start": 8.0, "steps": 3.0, "end": 0.5}
    assert summary["steps"] == 2
    assert (summary["reward_first"], summary["reward_last"]) == (0.1, 0.4)
    assert (summary["eval_first"], summary["eval_last"]) == (0.1, 0.8)
    assert summary["logprob_diff_max"] == 2e-6
    assert (summary["groups_trained"], summary["groups_lost"], summary["restarts"]) == (4, 0, 1)
    assert summary["samples_trained"] == 8
    assert summary["warnings"] == []


def test_a_summary_has_all_warnings_of_its_run_active_ones_first(tmp_path: Path) -> None:
    for step in range(1, 8):
        cut_off = 0.99 if step < 5 else 0.0
        record = {"step": step, "rollout/truncated_ratio": cut_off, "rollout/failed_ratio": 0.5}
        run_directory.append(tmp_path / run_directory.METRICS, record)
    failure = {"serial": 1, "dataset": "sums", "row": 4, "reason": "reward raised KeyError: 'a'"}
    run_directory.append(tmp_path / run_directory.FAILURES, failure)
    summary = summarize(
        tmp_path,
        state="Succeeded",
        restarts=0,
        wall_seconds=1.0,
        totals=Totals({"groups_leased": 8, "groups_trained": 7, "groups_failed": 1}, {"a": 1}),
        device_seconds={},
        spec=SPEC,
        warnings=[RunWarning("fruitless", "32 groups failed without a step", active=False)],
    )
    warnings = [
        (warning["kind"], warning["active"], warning["last_step"])
        for warning in summary["warnings"]
    ]
    assert warnings == [
        ("failed groups", True, None),
        ("failures", True, 7),
        ("fruitless", False, None),
        ("truncation", False, 4),
    ]
    assert "row 4 of sums: reward raised KeyError: 'a'" in summary["warnings"][0]["text"]
    assert warning_lines([RunWarning(**warning) for warning in summary["warnings"]])[1:] == [
        f"warning: steps 3-7: {summary['warnings'][1]['text']}",
        "warnings that no longer hold: fruitless, truncation (steps 3-4)",
    ]


def test_a_run_without_a_step_has_a_summary(tmp_path: Path) -> None:
    summary = summarize(
        tmp_path,
        state="Failed",
        restarts=0,
        wall_seconds=1.0,
        totals=Totals({}, {}),
        device_seconds={},
        spec=SPEC,
    )
    assert (summary["steps"], summary["reward_first"], summary["eval_last"]) == (0, None, None)


def test_timeline_spans_join_equal_states_and_leave_gaps() -> None:
    def at(time: float, **states: str) -> dict[str, object]:
        return {"time": time, "states": states}

    samples = [at(0, t="a"), at(1, t="a"), at(2, t="b"), at(3), at(4, t="b"), at(5, t="b")]
    assert spans(samples, "t") == [("a", 0, 2), ("b", 2, 3), ("b", 4, 5)]
