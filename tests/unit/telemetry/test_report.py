"""report.html: warnings, figures that tell their values, and what each role did."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from sluice.images import thumbnail
from sluice.images.image import image_part
from sluice.telemetry import goodput, run_directory
from sluice.telemetry.headline import headline
from sluice.telemetry.report import write_report
from sluice.telemetry.report.figures import restart_steps
from sluice.telemetry.report.timeline import (
    CATEGORIES,
    STATES,
    completed,
    timeline,
    trainer_spans,
)
from sluice.telemetry.run_warnings import RunWarning
from tests.images import png

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("ppo_kl", "warned"), [(0.4, 1), (0.0, 0)])
def test_a_report_has_the_warnings_of_its_run(tmp_path: Path, ppo_kl: float, warned: int) -> None:
    for step in (1, 2, 3):
        run_directory.append(
            tmp_path / run_directory.METRICS,
            {"step": step, "rollout/raw_reward": 0.5, "train/ppo_kl": ppo_kl},
        )
    text = write_report(tmp_path, "job").read_text()
    assert text.count("<li><b>steps 1-3:</b> ppo_kl is 0.4: within one batch") == warned
    assert ("<h2>Warnings</h2>" in text) == bool(warned)


def test_past_warnings_are_folded_and_active_ones_are_shown(tmp_path: Path) -> None:
    for step in range(1, 10):
        cut_off = 0.99 if step < 5 else 0.0
        record = {"step": step, "rollout/truncated_ratio": cut_off}
        run_directory.append(tmp_path / run_directory.METRICS, record)
    text = write_report(tmp_path, "job").read_text()
    assert "<h2>Warnings</h2>" not in text
    _, _, history = text.partition("<summary>Warnings that no longer hold (1)</summary>")
    assert history.startswith("<ul><li><b>steps 3-4:</b> 99% of the responses are cut off")
    books = RunWarning("failed groups", "3 of 9 groups failed")
    summary = {"warnings": [books.to_json(), RunWarning("truncation", "old").to_json()]}
    run_directory.write_json(tmp_path / run_directory.SUMMARY, summary)
    text = write_report(tmp_path, "job").read_text()
    assert "<h2>Warnings</h2><ul><li>3 of 9 groups failed</li></ul>" in text


def test_a_summary_of_an_older_release_does_not_hinder_a_report(tmp_path: Path) -> None:
    run_directory.append(tmp_path / run_directory.METRICS, {"step": 1, "train/loss": 1.0})
    run_directory.write_json(tmp_path / run_directory.SUMMARY, {"warnings": ["3 groups failed"]})
    assert "3 groups failed" not in write_report(tmp_path, "job").read_text()


def test_a_page_fits_a_phone_and_runs_no_script(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_directory.append(tmp_path / run_directory.METRICS, {"step": step, "train/loss": 1.0})
    text = write_report(tmp_path, "<script>alert(1)</script>").read_text()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy.split("; ")[:2] == ["default-src 'none'", "style-src 'unsafe-inline'"]
    assert not re.search(r"<script|<img|<link|<image|url\((?!#)|[\"' ](?:src|href)=\"(?!#)", text)


def test_the_values_of_a_step_show_on_hover(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        record = {"step": step, "rollout/raw_reward": step / 4, "perf/seconds/waiting": 0.5}
        run_directory.append(tmp_path / run_directory.METRICS, record)
    evaluation = {"version": 2, "dataset": "a", "eval/a": 0.125}
    run_directory.append(tmp_path / run_directory.EVALUATION, evaluation)
    text = write_report(tmp_path, "job").read_text()
    titles = re.findall(r'<g class="hover">\s*<title>([^<]*)</title>', text)
    assert titles[:3] == [
        "step 1\nreward 0.25",
        "step 2\nreward 0.5\nheld out 0.125",
        "step 3\nreward 0.75",
    ]
    assert titles[3:] == [f"step {step}\nwaiting for samples 0.5" for step in (1, 2, 3)]


def test_a_long_run_has_areas_that_a_pointer_can_hit(tmp_path: Path) -> None:
    for step in range(1, 1001):
        record = {"step": step, "rollout/raw_reward": 0.5}
        run_directory.append(tmp_path / run_directory.METRICS, record)
    text = write_report(tmp_path, "job").read_text()
    assert text.count('<g class="hover">') == 200


def seconds(part: str, time: float, attempt: int = 1, **phases: float) -> dict[str, Any]:
    return {"part": part, "time": time, "attempt": attempt, "seconds": phases}


def step_record(step: int, time: float, attempt: int = 1, **phases: float) -> dict[str, Any]:
    named = {f"perf/seconds/{phase}": value for phase, value in phases.items()}
    return {"step": step, "time": time, "attempt": attempt, **named}


def test_the_trainers_row_of_the_timeline_is_complete(tmp_path: Path) -> None:
    """With one sample a second, short phases and the first and last second are not seen."""
    for record in (
        seconds("start", 110.0, starting=9.5, publishing=0.5),
        seconds("end", 113.0, saving=0.75, exporting=0.25),
    ):
        run_directory.append(tmp_path / run_directory.SECONDS, record)
    for record in (
        step_record(1, 111.0, waiting=0.75, training=0.25),
        step_record(2, 112.0, publishing=0.25, waiting=0.5, training=0.25),
    ):
        run_directory.append(tmp_path / run_directory.METRICS, record)
    for time in range(104, 112):
        sample = {"time": float(time), "states": {"trainer-0": "waiting", "buffer-0": "serving"}}
        run_directory.append(tmp_path / run_directory.TIMELINE, sample)
    chart = timeline(tmp_path)
    assert chart is not None
    assert chart.ticks == ["0 s", "3 s", "6 s", "10 s", "13 s"]
    row = chart.rows["trainer-0"]
    assert row[0].left == 0
    assert row[-1].left + row[-1].width == pytest.approx(1000)
    assert all(b.left == pytest.approx(a.left + a.width) for a, b in pairwise(row))
    assert [bar.text.partition(":")[0] for bar in row] == [
        *("starting", "publishing"),
        *("waiting", "training"),
        *("publishing", "waiting", "training"),
        *("saving", "exporting"),
    ]
    assert row[0].text == "starting: 9.5 s, from 0 s on"


def test_the_steps_of_a_long_run_are_joined_and_none_of_their_seconds_is_lost() -> None:
    records = [
        {"time": float(end), "attempt": 1 + end // 600, "phases": {"waiting": 0.5, "training": 0.5}}
        for end in range(1, 1001)
    ]
    row = trainer_spans(records)
    assert len(row) <= 2 * 202
    assert sum(end - begin for _, begin, end in row) == pytest.approx(1000)
    assert (row[0][1], row[-1][2]) == (0, 1000)


def test_samples_fill_the_gap_that_a_crash_has_left() -> None:
    exact = [("training", 0.0, 10.0), ("starting", 20.0, 25.0)]
    sampled = [("waiting", 8.0, 14.0), ("starting", 19.0, 30.0)]
    assert completed(exact, sampled) == [
        ("training", 0.0, 10.0),
        ("waiting", 10.0, 14.0),
        ("starting", 19.0, 20.0),
        ("starting", 20.0, 25.0),
        ("starting", 25.0, 30.0),
    ]


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
    assert '<tr class="heads"><th>prompt</th><th>response</th>' in text
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
        "<dt>duration</dt><dd>1:02:03</dd>",
        "<dt>lost</dt><dd>0</dd>",
        "<li>2026-01-31T12:00:00 GangRestarting: trainer-0 failed</li>",
        "<th>after step 0, reward 0</th><td>&lt;b&gt;three&lt;/b&gt;</td>",
        "<th>after step 3, reward 0</th><td>4</td>",
        "<b>Learning rate</b>",
        "<h2>Goodput</h2>",
    ):
        assert expected in text


def test_every_state_has_a_different_colour() -> None:
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
def test_the_headline_is_the_most_informative_metric(record: dict[str, float], name: str) -> None:
    assert headline([record]) == (name, [0.5])
    assert headline([]) == ("reward", [])


def test_a_page_shows_the_images_of_prompts(tmp_path: Path) -> None:
    images = [png(400, 200, seed) for seed in (1, 2)]
    samples = tmp_path / "samples"
    thumbnail.write(samples, images[0])
    for step in (1, 2, 3):
        run_directory.append(
            tmp_path / run_directory.METRICS, {"step": step, "rollout/raw_reward": 0.5}
        )
    for version in (0, 3):
        rows = [
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [image_part(image.digest), {"type": "text", "text": "What?"}],
                    }
                ],
                "response": f"answer {number} of {version}",
                "label": "x",
                "reward": 0.0,
            }
            for number, image in enumerate(images)
        ]
        path = samples / f"eval_held_out_{version:07d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(tmp_path, "job").read_text()
    assert "user: [image]What?" in text
    assert "img-src data:" in text
    # Once in the table of answers over time, once in that of the latest answers. The other image
    # has no thumbnail, but a separate row.
    assert text.count('<img src="data:image/jpeg;base64,') == 2
    assert text.count("answer 1 of 0") == 1
    with Pillow.open(thumbnail.path_of(samples, images[0].digest)) as small:
        assert small.size == (160, 80)
