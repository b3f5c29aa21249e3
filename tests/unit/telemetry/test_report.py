"""report.html tells of what looked sick, once, where it was first seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.telemetry import goodput, run_directory
from sluice.telemetry.headline import headline
from sluice.telemetry.report import write_report
from sluice.telemetry.report.figures import restart_steps
from sluice.telemetry.report.timeline import CATEGORIES, STATES

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("ppo_kl", "warned"), [(0.4, 1), (0.0, 0)])
def test_a_report_has_the_warnings_of_its_run(tmp_path: Path, ppo_kl: float, warned: int) -> None:
    for step in (1, 2, 3):
        run_directory.append(
            tmp_path / run_directory.METRICS,
            {"step": step, "rollout/raw_reward": 0.5, "train/ppo_kl": ppo_kl},
        )
    text = write_report(tmp_path, "job").read_text()
    assert text.count("<li>step 1: ppo_kl is 0.4: within one batch") == warned
    assert ("<h2>Warnings</h2>" in text) == bool(warned)


def test_a_run_without_rewards_shows_what_is_learned_instead(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_directory.append(
            tmp_path / run_directory.METRICS, {"step": step, "train/loss": 3.0 / step}
        )
    for version, reward in ((0, 0.0), (3, 1.0)):
        record = {"version": version, "dataset": "held-out", "eval/held-out": reward}
        run_directory.append(tmp_path / run_directory.EVALUATION, record)
    (tmp_path / "samples").mkdir()
    row = {"prompt": "1 + 1", "response": "2", "label": None, "reward": None}
    (tmp_path / "samples/step_0000003.jsonl").write_text(json.dumps(row) + "\n")
    text = write_report(tmp_path, "job").read_text()
    assert "<figcaption><b>Loss</b>" in text
    assert "<figcaption><b>Reward" not in text
    assert "<figcaption><b>Distance of the policy" not in text, "there is nothing to draw in it"
    assert "<tr><th>prompt</th><th>response</th>" in text
    assert (tmp_path / "loss.png").exists()
    assert not (tmp_path / "reward.png").exists()


def test_a_page_says_what_the_run_was_and_how_its_answers_change(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        record = {"step": step, "time": 1.7e9 + step, "attempt": 1 + step // 3}
        record |= {"rollout/raw_reward": 0.5, "rollout/reward_std": 0.1, "train/lr-pg_0": 1e-4}
        run_directory.append(tmp_path / run_directory.METRICS, record)
    (tmp_path / "samples").mkdir()
    for version, response in ((0, "<b>three</b>"), (2, "four"), (3, "4")):
        row = {"prompt": "2 + 2", "response": response, "label": "4", "reward": 0.0}
        path = tmp_path / f"samples/eval_held_out_{version:07d}.jsonl"
        path.write_text(json.dumps(row) + "\n")
    job = {"spec": {"trainer": {"steps": 3, "optimizer": {"lr": 1e-4}}}}
    run_directory.write_json(tmp_path / run_directory.JOB, job)
    run_directory.write_json(tmp_path / run_directory.VERSIONS, {"torch": "2.13.0"})
    summary = {"state": "Succeeded", "goodput": 0.6, "groups_lost": 0, "wall_seconds": 3723}
    summary["goodput_seconds"] = {"trained": 30.0, "generated": 30.0, "waited": 40.0}
    summary["device_seconds"] = {"rollout/generating": 10.0, "rollout/tail": 20.0}
    run_directory.write_json(tmp_path / run_directory.SUMMARY, summary)
    event = {"time": "2026-01-31T12:00:00.1Z", "type": "Warning", "reason": "GangRestarting"}
    run_directory.append(tmp_path / run_directory.EVENTS, event | {"message": "trainer-0 failed"})
    text = write_report(tmp_path, "job").read_text()
    for expected in (
        "<th>trainer.optimizer.lr</th><td>0.0001</td>",
        "<th>torch</th><td>2.13.0</td>",
        "<th>last step</th><td>2023-11-14 22:13 UTC</td>",
        "<dt>goodput</dt><dd>60%</dd>",
        "<dt>took</dt><dd>1:02:03</dd>",
        "<dt>lost</dt><dd>0</dd>",
        "<li>2026-01-31T12:00:00 GangRestarting: trainer-0 failed</li>",
        "<th>after step 0, reward 0</th><td>&lt;b&gt;three&lt;/b&gt;</td>",
        "<th>after step 3, reward 0</th><td>4</td>",
        "<b>Learning rate</b>",
        "<h2>Goodput</h2>",
    ):
        assert expected in text


def test_each_state_has_a_colour_of_its_own() -> None:
    assert len(set(STATES.values())) == len(STATES)
    assert set(CATEGORIES) == {*goodput.CATEGORIES, goodput.IN_TAILS}


def test_a_later_attempt_of_the_trainer_is_a_restart() -> None:
    attempts = {1: 1, 2: 1, 3: 2, 4: 2, 5: 3}
    assert restart_steps({step: {"attempt": n} for step, n in attempts.items()}) == [3, 5]


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"rollout/raw_reward": 0.5, "train/loss": 1.0}, "reward"),
        ({"train/opd_reverse_kl": 0.5, "train/loss": 1.0}, "reverse KL"),
        ({"train/loss": 0.5}, "loss"),
    ],
)
def test_the_headline_is_the_most_telling_number(record: dict[str, float], name: str) -> None:
    assert headline([record]) == (name, [0.5])
    assert headline([]) == ("reward", [])
