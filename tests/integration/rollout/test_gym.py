"""Environments of Gymnasium and GEM at a real engine, in a separate interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.sglang.client import Client
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import turn_rewards
from sluice_rollout.environments.program import Program, program_of
from sluice_rollout.scoring import seat_rewards
from tests.integration.rollout.pods import job
from tests.integration.rollout.test_gateway import (
    AGENT,
    CALLING,
    RequestLog,
    check_tokens,
    runner_at_gateway,
)
from tests.integration.rollout.test_gateway import talkative as talkative
from tests.tools import missing

GYM_PYTHON = Path(
    os.environ.get("SLUICE_GYM_PYTHON") or Path(sys.prefix).parent / ".venv-gym/bin/python"
)
ANYTHING = "tests/unit/environments/gym_lakes.py:Anything"


@pytest.fixture(autouse=True)
def interpreter() -> None:
    if not GYM_PYTHON.exists():
        missing("needs gymnasium and GEM: make agents")


def make_program(directory: Path, model: Path, **gym: Any) -> Program:
    settings = {key: value for key, value in AGENT.items() if key != "rollout__function"}
    environment = {"gym": {**gym, "python": str(GYM_PYTHON)}}
    spec = job(directory, model, **settings, rollout__environment=environment).spec
    assert spec.rollout.environment
    return program_of(spec.rollout.environment, spec)


async def test_samples_of_a_prompt_have_the_same_first_observation(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    """Taxi draws its first state from the seed."""
    program = make_program(tmp_path, talkative, id="Taxi-v4", function=ANYTHING, maxTurns=3)
    log = RequestLog(engine)
    samples, beginnings = [], []
    try:
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            for group in (7, 7, 8):
                log.answers.clear()
                sample = await runner(Prompt(group, "w0008"), [5], Sample(0), CALLING)
                assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
                check_tokens(sample, log)
                beginnings.append(sample.tokens[: sample.prompt_length].tolist())
                samples.append(sample)
    finally:
        program.close()
    assert beginnings[0] == beginnings[1] != beginnings[2]
    assert samples[0].metadata["gym"]["steps"] == 3
    assert set(turn_rewards(samples[0])[""]) <= {-1.0, -10.0}


async def test_an_environment_of_gem(engine: Client, talkative: Path, tmp_path: Path) -> None:
    """An invalid guess ends the game."""
    settings = {"id": "game:GuessTheNumber-v0-easy", "module": "gem"}
    program = make_program(tmp_path, talkative, **settings)
    try:
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            sample = await runner(Prompt(7, "w0008"), [5], Sample(0), CALLING)
    finally:
        program.close()
    assert (sample.error, sample.metadata["gym"]["terminated"]) == ("", True)
    seat_rewards.settle(sample)
    assert sample.reward == pytest.approx(-0.1)
