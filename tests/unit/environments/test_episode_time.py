"""Programs and pods whose episode's time passes: partial credit, and nothing is left running."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from sluice.api.groups.episode import EpisodeLimits
from sluice.samples.episode_protocol import VERIFIER
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import TIMED_OUT, turn_rewards
from sluice_rollout.environments.program import Program
from sluice_rollout.user_functions import time_limit
from tests.integration.rollout.pod_process import Pod
from tests.unit.environments.program_tools import (
    FOREVER,
    left_behind,
    program_runner,
    python_command,
)
from tests.unit.environments.test_gym import ECHO, gym_program
from tests.unit.environments.test_verifier import JudgedProgram
from tests.unit.environments.test_verifier_pods import worker
from tests.unit.gateway.gateway_tools import token_ids
from tests.unit.rollout.scripted_engine import PARAMS, Script, SlowScript

PROMPT = Prompt(3, "2+2", "4", {"level": 1, "tests": "hidden"})
REACHED = "took more than 0.5 s (rollout.limits.seconds)"
LIMITS = EpisodeLimits(seconds=0.5)
# Leaves an artifact that is half of the work, and goes on.
HALF = """
ask("x")
pathlib.Path(os.environ["SLUICE_ARTIFACTS"], "answer.txt").write_text("4")
"""
JUDGE = """
answer = pathlib.Path(os.environ["SLUICE_ARTIFACTS"], "answer.txt")
leave(reward=0.5 if answer.exists() else 0.0)
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "GRACE_SECONDS", 2.0)


async def play(
    program: Program, engine: Script, directory: Path, limits: EpisodeLimits = LIMITS
) -> Sample:
    """Play an episode, and check that nothing of it is left behind."""
    program.open()
    try:
        async with program_runner(program, engine, directory) as runner:
            runner.limits = limits
            params = PARAMS | {"max_new_tokens": 100}
            sample = await asyncio.wait_for(runner(PROMPT, [1], Sample(0), params), 60)
        assert program.fork_server or left_behind(program) == []
        return sample
    finally:
        program.close()


def program_of(text: str) -> Program:
    return Program("agent", python_command(text), {"PATH": os.environ["PATH"]}, "tiny", 8)


ASKS_ON = """
said, refusal = [], None
messages = [{"role": "user", "content": "x"}]
while refusal is None:
    try:
        said.append(ask("x", messages=messages))
    except urllib.error.HTTPError as error:
        refusal = json.load(error)["error"]
    else:
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "go"}]
leave(reward=0.25 * len(said), metadata={"said": said, "code": refusal["code"]})
"""


@pytest.mark.parametrize("status", ["", "sys.exit(1)"], ids=["ends well", "gives up"])
async def test_a_program_gets_the_cut_turn_and_a_refusal_and_may_end_by_itself(
    status: str, tmp_path: Path
) -> None:
    engine = SlowScript(token_ids("hello"), cut=token_ids("wor"))
    sample = await play(program_of(ASKS_ON + status), engine, tmp_path)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert sample.metadata["said"] == ["hello", "wor"]
    assert sample.metadata["code"] == "context_length_exceeded"
    assert (sample.metadata[TIMED_OUT], sample.reward) == (REACHED, 0.5)
    sampled = sample.tokens[sample.prompt_length :][sample.loss_mask == 1].tolist()
    assert sampled == [*token_ids("hello"), *token_ids("wor")]
    assert sample.rollout_log_probs[sample.loss_mask == 1].tolist() == [-0.5] * len(sampled)


async def test_a_program_that_hangs_is_ended_and_its_result_so_far_counts(tmp_path: Path) -> None:
    program = program_of("ask('x')\nleave(reward=0.75)\n" + FOREVER)
    sample = await play(program, Script(token_ids("hello")), tmp_path)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert (sample.metadata[TIMED_OUT], sample.reward) == (REACHED, 0.75)


async def test_the_verifier_judges_what_a_program_that_was_ended_has_left(tmp_path: Path) -> None:
    program = JudgedProgram(HALF + FOREVER, JUDGE)
    sample = await play(program, Script(token_ids("4")), tmp_path)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert (sample.metadata[TIMED_OUT], sample.reward) == (REACHED, 0.5)


async def test_a_program_fails_if_the_job_says_so(tmp_path: Path) -> None:
    limits = EpisodeLimits.model_validate({"seconds": 0.5, "onTimeout": "fail"})
    program = program_of("ask('x')\nleave(reward=0.75)\n" + FOREVER)
    sample = await play(program, Script(token_ids("hello")), tmp_path, limits)
    assert sample.status is SampleStatus.FAILED
    assert sample.error == f"agent {REACHED}"


async def test_an_environment_keeps_the_rewards_of_the_turns_until_then(tmp_path: Path) -> None:
    engine = SlowScript(token_ids("on"), token_ids("on"), cut=token_ids("o"))
    async with gym_program(**ECHO) as program:
        sample = await play(program, engine, tmp_path)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert turn_rewards(sample) == {"": [0.5, 0.5, 0.5]}
    assert (sample.metadata[TIMED_OUT], sample.metadata["gym"]["steps"]) == (REACHED, 3)


@pytest.mark.parametrize("judges", [True, False], ids=["a verifier", "its result"])
async def test_a_pod_sends_what_its_program_has_left_and_ends(judges: bool, tmp_path: Path) -> None:
    rules: Any = {} if judges else {"rules": None}
    text = (HALF if judges else "ask('x')\nleave(reward=0.25)\n") + FOREVER
    async with worker(tmp_path, **rules) as (runner, address):
        runner.limits = LIMITS
        with (
            Pod(tmp_path / "pod", address, python_command(text)) as pod,
            Pod(tmp_path / "verifier", address, python_command(JUDGE), VERIFIER),
        ):
            params = PARAMS | {"max_new_tokens": 100}
            sample = await asyncio.wait_for(runner(PROMPT, [1], Sample(0), params), 60)
            assert await pod.ends() == 0
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert (sample.metadata[TIMED_OUT], sample.reward) == (REACHED, 0.5 if judges else 0.25)
