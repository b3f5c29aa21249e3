"""A fault costs only the groups that it hits; a fault that hits all groups ends the job.

These are whole runs on real engines.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.telemetry import run_directory
from tests.integration.run.laptop import Laptop

pytestmark = pytest.mark.timeout(900)
Make = Callable[..., Laptop]
SMALL = ("rollout.batchSize=8", "evaluation=null", "trainer.steps=4")


def reward(directory: Path, body: str) -> str:
    path = directory / "reward.py"
    path.write_text(f"def score(sample):\n{body}")
    return f"reward={{function: '{path}:score'}}"


def test_a_reward_that_raises_for_every_sample_fails_the_job_with_the_exception(
    laptop: Make, tmp_path: Path
) -> None:
    run = laptop(*SMALL, reward(tmp_path, "    return {}['answer']\n"), name="raises")
    assert run.run() == 1
    text = run.text()
    assert "32 groups in a row failed, and not one of their samples can be trained" in text
    assert "KeyError: 'answer'" in text.rpartition("32 groups in a row failed")[2], (
        "the cause, in the last words"
    )
    assert run.summary()["groups_leased"] < 100, "nothing more was burnt"
    failures = list(run_directory.records(run.directory / run_directory.FAILURES))
    assert [failure["serial"] for failure in failures][:32] == list(range(1, 33))
    assert "KeyError: 'answer'" in failures[0]["reason"]
    (warning,) = (
        record for record in run.summary()["warnings"] if record["kind"] == "failed groups"
    )
    assert failures[0]["reason"] in warning["text"], "the list says why, and is not cut"


@pytest.mark.long
def test_a_reward_that_raises_for_some_prompts_fails_those_alone(
    laptop: Make, tmp_path: Path
) -> None:
    body = (
        "    if '7' in sample.prompt:\n        raise ValueError('seven')\n    return float('3' in "
        "sample.response)\n"
    )
    run = laptop(*SMALL, reward(tmp_path, body), name="some")
    assert run.run() == 0, run.text()[-3000:]
    summary = run.summary()
    assert (summary["groups_lost"], summary["groups_trained_twice"]) == (0, 0)
    assert summary["groups_trained"] == 4 * 8
    (reason,) = summary["groups_failed_by_reason"]
    assert "ValueError_seven" in reason
    assert summary["groups_failed_by_reason"][reason] == summary["groups_failed"] > 0
    (warning,) = (record for record in summary["warnings"] if record["kind"] == "failed groups")
    assert "failed and were not trained" in warning["text"]
    assert "warning: " in run.text()


@pytest.mark.long
def test_storage_for_two_steps_trains_six_with_early_checkpoints(
    laptop: Make, tmp_path: Path
) -> None:
    rows = tmp_path / "large.jsonl"
    rows.write_text("".join(json.dumps(large_row(number)) + "\n" for number in range(64)))
    run = laptop(
        *SMALL,
        f"data.prompts[0].path={rows}",
        "buffer.storage.size=1Mi",
        "checkpoint.everySteps=100",
        "trainer.steps=6",
        name="narrow",
    )
    assert run.run() == 0, run.text()[-3000:]
    log = "".join(path.read_text() for path in (run.directory / "logs").glob("*trainer*"))
    assert "is taken early: buffer.storage.size has no room" in log
    assert run.summary()["groups_trained"] == 6 * 8


def large_row(number: int) -> dict[str, Any]:
    """A row of 50 kB, so that a batch of eight takes two fifths of a MiB."""
    prompt, note = f"max {number % 10} 2 5 =", random.Random(number).randbytes(25_000).hex()
    return {"prompt": prompt, "label": str(max(number % 10, 5)), "metadata": {"note": note}}
