"""Environments of verifiers at a real engine, in a separate interpreter."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sluice.api.groups.data import PromptSource
from sluice.data.files import read_source
from sluice.data.rows import parse_row
from sluice.engines.sglang.client import Client
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_cli.data.verifiers_rows import rows_of
from sluice_cli.main import app
from sluice_rollout.environments import orphan_reaper
from sluice_rollout.environments.fork_server_process import ForkServerLostError
from sluice_rollout.environments.program import Program, program_of
from tests.integration.rollout.pods import job
from tests.integration.rollout.test_gateway import (
    AGENT,
    PARAMS,
    RequestLog,
    check,
    check_tokens,
    runner_at_gateway,
)
from tests.integration.rollout.test_gateway import talkative as talkative
from tests.tools import VERIFIERS_PYTHON, missing

NAME, HERE = "verifiers_words", str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not VERIFIERS_PYTHON.exists():
        missing("needs verifiers: make agents")
    monkeypatch.setenv("PYTHONPATH", HERE)


def make_program(directory: Path, model: Path, name: str = NAME, **taskset: Any) -> Program:
    settings = {key: value for key, value in AGENT.items() if key != "rollout__function"}
    environment = {
        "verifiers": {
            "name": name,
            "args": {"taskset": taskset},
            "python": str(VERIFIERS_PYTHON),
        },
        "env": {"PYTHONPATH": HERE},
    }
    spec = job(directory, model, **settings, rollout__environment=environment).spec
    assert spec.rollout.environment
    return program_of(spec.rollout.environment, spec)


def prompt(**taskset: Any) -> Prompt:
    """Return the first row of the environment, as a job reads it."""
    (row,) = rows_of(NAME, {"taskset": taskset}, str(VERIFIERS_PYTHON), 1)
    parsed = parse_row(row, PromptSource(path="rows.jsonl"))
    return Prompt(0, parsed.prompt, parsed.label, parsed.metadata)


async def test_an_environment_plays_its_own_tasks_and_gives_its_own_reward(
    engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    """The episode has three turns, with a tool of the environment."""
    taskset: dict[str, Any] = {"turns": 3, "tools": True}
    program, log = make_program(tmp_path, talkative, **taskset), RequestLog(engine)
    try:
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            await program.check()
            sample = await runner(prompt(**taskset), [5], Sample(0), PARAMS)
        assert [n.partition("-")[0] for n in os.listdir(program._directory)] == ["fork"]
    finally:
        program.close()
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, ""), "the last turn was cut"
    assert sample.reward == 1.5
    assert sample.reward_parts == {"score": 1.5, "turns": 1.5, "turns_asked": 3.0}
    check_tokens(sample, log)
    check(sample, {0: model})


@pytest.mark.long
async def test_an_episode_of_a_single_turn(engine: Client, talkative: Path, tmp_path: Path) -> None:
    program = make_program(tmp_path, talkative)
    try:
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            sample = await runner(prompt(), [5], Sample(0), PARAMS)
            bare = await runner(Prompt(0, "w0002"), [5], Sample(0), PARAMS)
    finally:
        program.close()
    assert (sample.error, sample.reward, sample.trainable_tokens) == ("", 0.5, 12)
    assert "the row has no metadata.task: expected rows of `sluice data" in bare.error


async def test_an_episode_whose_interpreter_dies_is_played_again(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    """The group goes back to the buffer, as if its engine had died."""
    program = make_program(tmp_path, talkative)
    try:
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            await program.check()
            process = program.fork_server and program.fork_server._process
            assert process
            assert process._transport
            running = asyncio.create_task(runner(prompt(), [5], Sample(0), PARAMS))
            async with asyncio.timeout(60):
                # the fork server, its child, and the agent's program
                while len(orphan_reaper.marked_processes(program._directory)) < 3:
                    await asyncio.sleep(0.05)
            os.kill(process._transport.get_pid(), signal.SIGKILL)
            with pytest.raises(ForkServerLostError):
                await running
            assert len(os.listdir(program._directory)) == 1, "the fork server's own"
            again = await runner(prompt(), [5], Sample(0), PARAMS)
    finally:
        program.close()
    assert (again.error, again.reward) == ("", 0.5)


async def test_a_missing_taskset_is_an_error_before_the_first_episode(
    talkative: Path, tmp_path: Path
) -> None:
    program = make_program(tmp_path, talkative, "no-such-taskset")
    try:
        with pytest.raises(ConfigurationError, match="taskset 'no-such-taskset' not found"):
            await program.check()
    finally:
        program.close()


def rows(target: Path, *words: str) -> Result:
    command = ["data", "from-verifiers", NAME, str(target), "--python", str(VERIFIERS_PYTHON)]
    return CliRunner().invoke(app, [*command, *words])


def test_rows_are_the_environments_tasks(tmp_path: Path) -> None:
    result = rows(tmp_path / "rows.jsonl", "--arg", 'taskset={"turns": 2}')
    assert result.exit_code == 0, result.output
    written = [located.row for located in read_source(str(tmp_path / "rows.jsonl"))]
    assert [row["prompt"] for row in written] == ["w0002", "w0005", "w0008"]
    assert [row["metadata"]["task"]["turns"] for row in written] == [2, 2, 2]


def test_wrong_arguments_are_reported(tmp_path: Path) -> None:
    result = rows(tmp_path / "rows.jsonl", "--arg", 'taskset={"turns": "many"}')
    assert result.exit_code == 2
    assert "verifiers verifiers_words yields no rows:" in result.output
    assert "taskset.turns" in result.output
