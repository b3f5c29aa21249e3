"""Pages of episodes, next to a run's report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sluice.images import thumbnail
from sluice.telemetry import run_directory
from sluice.telemetry.report import episodes, write_report
from tests.images import png

pytest.importorskip("matplotlib")

CALL = '<tool_call>{"name": "add"}</tool_call>'


def turn(number: int, text: str, **more: Any) -> dict[str, Any]:
    return {"by": "model", "text": text, "tokens": 4, "turn": number, "finish": "stop", **more}


def context(text: str) -> dict[str, Any]:
    return {"by": "environment", "text": text, "tokens": 3}


def record(**more: Any) -> dict[str, Any]:
    main = [context("What is 1+2?"), turn(0, CALL), context("3"), turn(1, "It is <b>3</b>.")]
    return {
        "group_id": 7,
        "index": 2,
        "reward": 0.5,
        "status": "completed",
        "weight_versions": [3, 3],
        "transcript": [
            {"turns": main},
            {"turns": [context("4"), turn(2, "It is 4.", reward=-1.0)], "after": 0},
        ],
        **more,
    }


def write(directory: Path, name: str, *records: dict[str, Any]) -> None:
    for one in records:
        path = directory / "samples" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        run_directory.append(path, one)


def test_an_episode_has_a_page_that_the_report_links_to(tmp_path: Path) -> None:
    run_directory.append(tmp_path / run_directory.METRICS, {"step": 1, "train/loss": 1.0})
    write(tmp_path, "step_0000004", record(), {"group_id": 7, "index": 3, "reward": 1.0})
    report = write_report(tmp_path, "job").read_text()
    [link] = re.findall(r'<a href="(episodes/[^"]+)">', report)
    page = (tmp_path / link).read_text()
    assert "<h1>step 0000004, group 7, sample 2</h1>" in page
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))
    assert facts == {
        "reward": "0.5", "status": "completed", "turns": "3", "tool calls": "1",
        "sampled tokens": "12", "other tokens": "9", "branches": "2", "weights": "3",
    }  # fmt: skip
    assert re.findall(r"<h3>([^<]+)</h3>", page) == [
        "Context", "Turn 1", "Context", "Turn 2", "Context", "Turn 3",
    ]  # fmt: skip
    assert "<h2>Branch 2, after turn 1</h2>" in page
    assert "4 tokens · reward -1" in page
    assert "It is &lt;b&gt;3&lt;/b&gt;." in page
    assert not re.search(r"<script|<link|src=\"(?!data:)", page)
    assert 'name="viewport"' in page


def test_a_page_says_why_an_episode_was_cut_off(tmp_path: Path) -> None:
    reason = "took more than 60 s (rollout.limits.seconds)"
    write(tmp_path, "step_0000004", record(status="truncated", timed_out=reason))
    (page,) = episodes.pages(tmp_path)
    assert (page.facts["status"], page.facts["cut off"]) == ("truncated", reason)


def test_a_run_without_episodes_has_no_pages(tmp_path: Path) -> None:
    run_directory.append(tmp_path / run_directory.METRICS, {"step": 1, "train/loss": 1.0})
    write(tmp_path, "step_0000001", {"group_id": 0, "index": 0, "reward": 1.0})
    assert "<h2>Episodes</h2>" not in write_report(tmp_path, "job").read_text()
    assert not (tmp_path / episodes.DIRECTORY).exists()


def test_the_newest_steps_come_first_and_pages_of_an_earlier_report_go(tmp_path: Path) -> None:
    run_directory.append(tmp_path / run_directory.METRICS, {"step": 1, "train/loss": 1.0})
    for step in range(1, 9):
        write(tmp_path, f"step_{step:07d}", record())
    write(tmp_path, "eval_held-out_0000009", record())
    old = tmp_path / episodes.DIRECTORY / "old.html"
    old.parent.mkdir()
    old.write_text("old")
    write_report(tmp_path, "job")
    assert [page.title.split(",")[0] for page in episodes.pages(tmp_path)] == [
        "eval held-out 0000009", *(f"step {step:07d}" for step in (8, 7, 6, 5, 4)),
    ]  # fmt: skip
    assert not old.exists()
    assert len(list(old.parent.iterdir())) == 6


def test_screenshots_and_seats_are_shown(tmp_path: Path) -> None:
    image = png()
    thumbnail.write(tmp_path / "samples", image)
    seen = turn(0, "A cat.", images=[image.digest, "forgotten"])
    transcript = [{"turns": [context("?"), seen], "seat": "painter"}]
    rewards = {"painter": 1.0}
    write(
        tmp_path,
        "step_0000001",
        record(transcript=transcript, seat_rewards=rewards, error="it failed"),
    )
    (page,) = episodes.pages(tmp_path)
    (only,) = page.sequences
    assert only.title == "Branch 1 of painter"
    assert [len(box.images) for box in only.turns] == [0, 1]
    assert (page.facts["reward of painter"], page.error) == ("1", "it failed")
