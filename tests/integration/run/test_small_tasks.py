"""`sluice init --data FILE` writes a task that learns, for any small file."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.run.laptop import Laptop, values
from tests.small_tasks import TASKS, write

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", TASKS)
def test_a_small_file_becomes_a_task_that_learns(tmp_path: Path, name: str) -> None:
    file = write(name, tmp_path)
    command = [sys.executable, "-m", "sluice_cli", "init", name, "--data", file.name, "--yes"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, env=os.environ)
    run = Laptop(tmp_path / name, tmp_path / "run", "trainer.steps=60", "evaluation=null")
    try:
        assert run.run(900) == 0, run.text()[-3000:]
    finally:
        run.stop()
    rewards = values(run.steps().values(), "rollout/raw_reward")
    first, last = statistics.mean(rewards[:3]), statistics.mean(rewards[-5:])
    assert last > first + 0.15, rewards
