"""report.html tells of what looked sick, once, where it was first seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.telemetry import run_directory
from sluice.telemetry.headline import headline
from sluice.telemetry.report import write_report

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
    assert "<figcaption>Loss</figcaption>" in text
    assert "<figcaption>Reward" not in text
    assert "<figcaption>KL and clipping" not in text, "there is nothing to draw in it"
    assert "<tr><th>prompt</th><th>response</th></tr>" in text
    assert (tmp_path / "loss.png").exists()
    assert not (tmp_path / "reward.png").exists()


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
