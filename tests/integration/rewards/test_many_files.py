"""Sandbox and judge work in a worker with descriptors above 1,023, which select rejects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sluice.api import Reward
from sluice.rewards import RewardInput
from sluice.rewards.judging.judge import Judge
from sluice.rewards.sandbox import ProgramRun, Sandbox
from sluice.runtime import open_files

# Descriptor that select takes.
HIGHEST = 1023


@pytest.fixture(autouse=True)
def _many_open() -> Iterator[None]:
    assert open_files.raise_limit() > HIGHEST + 200
    with ExitStack() as files:
        while files.enter_context(Path("/dev/null").open()).fileno() <= HIGHEST:
            pass
        yield


def test_a_program_runs() -> None:
    sandbox = Sandbox()
    try:
        ran = sandbox.run(source="print(1)", input="", seconds=60.0, memory=1 << 30, cpu_seconds=60)
    finally:
        sandbox.close()
    assert ran == ProgramRun("ok", "1\n", "")


async def test_functions_judge(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(sample): return len(sample.response)\n")
    judge = Judge(Reward(function=f"{file}:length"), workers=1)
    samples = [RewardInput(prompt="", response="a" * n, label="") for n in range(20)]
    try:
        assert await judge(samples) == [(float(n), {}) for n in range(20)]
    finally:
        await judge.close()
