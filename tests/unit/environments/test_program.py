"""Real programs at a real gateway, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import turn_rewards
from sluice_rollout.environments.program import Program, program_of
from sluice_rollout.user_functions.loading import UserCode
from tests.unit.environments.program_tools import (
    FOREVER,
    environment,
    left_behind,
    program_runner,
    python_command,
    until,
)
from tests.unit.gateway.gateway_tools import episode_runner, open_registry, token_ids
from tests.unit.rollout.scripted_engine import PARAMS, Script


@pytest.fixture
def make_program() -> Any:
    """Return a factory of programs from Python texts, which are closed at the end."""
    programs: list[Program] = []

    def make(text: str) -> Program:
        variables = {"PATH": os.environ["PATH"]}
        programs.append(Program("agent", python_command(text), variables, "tiny", 8))
        programs[-1].open()
        return programs[-1]

    yield make
    for program in programs:
        program.close()


async def play_program(
    program: Program, engine: Script, directory: Path, tokens: int = 100, seconds: float = 20.0
) -> Sample:
    prompt = Prompt(3, "2+2", "4", {"level": 1})
    async with program_runner(program, engine, directory, seconds) as runner:
        return await runner(prompt, [1], Sample(0), PARAMS | {"max_new_tokens": tokens})


async def test_a_program_plays_and_its_result_is_the_samples(
    make_program: Any, tmp_path: Path
) -> None:
    program = make_program("""
said = ask(os.environ["SLUICE_PROMPT"])
row = json.loads(pathlib.Path("row.json").read_text())
leave(reward={"score": 0.5, "style": 2}, metadata={"said": said, "row": row, "answer": "five"})
""")
    sample = await play_program(program, Script(token_ids("4")), tmp_path)
    assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
    assert (sample.response, sample.reward) == ("4", 0.5)
    assert sample.reward_parts == {"score": 0.5, "style": 2.0}
    assert (sample.metadata["said"], sample.metadata["answer"]) == ("4", "five")
    assert sample.metadata["row"]["label"] == "4"
    assert left_behind(program) == []


async def test_without_a_result_the_jobs_reward_judges(make_program: Any, tmp_path: Path) -> None:
    sample = await play_program(make_program("ask('hi')"), Script(token_ids("hello")), tmp_path)
    assert (sample.error, sample.reward, sample.metadata["answer"]) == ("", None, "hello")


async def test_a_program_must_give_a_reward_if_the_job_has_no_other(
    make_program: Any, tmp_path: Path
) -> None:
    program = make_program('ask("2+2")')
    program.must_reward = True
    sample = await play_program(program, Script(token_ids("4")), tmp_path)
    assert sample.error == "agent gave no reward, and the job has no spec.reward"
    program = make_program('ask("2+2"); leave(reward=0.0)')
    program.must_reward = True
    sample = await play_program(program, Script(token_ids("4")), tmp_path)
    assert (sample.error, sample.reward) == ("", 0.0)


async def test_a_program_plays_two_seats_and_leaves_a_reward_for_each(
    make_program: Any, tmp_path: Path
) -> None:
    program = make_program("""
opening = ask("begin", model="white")
ask(opening, model="black")
seats = json.loads(pathlib.Path("row.json").read_text())["seats"]
leave(rewards={"white": 1, "black": -1}, turn_rewards={"white": [0.5]}, metadata={"had": seats})
""")
    async with open_registry(
        tmp_path, rollout__seats=[{"name": "white"}, {"name": "black"}]
    ) as registry:
        runner = episode_runner(registry, program, Script(token_ids("e4"), token_ids("resign")))
        runner.seconds, runner.seats = 20.0, ("white", "black")
        sample = await runner(Prompt(3, "?"), [1], Sample(0), PARAMS | {"max_new_tokens": 100})
    assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
    assert sample.seat_rewards == {"white": 1, "black": -1}
    assert turn_rewards(sample) == {"white": [0.5], "black": [0]}
    assert sample.metadata["had"] == ["white", "black"]


FAILING = [
    pytest.param("ask('x'); sys.exit(3)", "agent ended with status 3", id="status"),
    pytest.param("ask('x'); 1 / 0", "agent ended with status 1: ZeroDivisionError", id="raises"),
    pytest.param("ask('x'); os.kill(os.getpid(), 11)", "agent was ended by SIGSEGV", id="signal"),
    pytest.param("pass", "agent ended before the model generated a token", id="asks nothing"),
    pytest.param("ask('x'); leave(reward='good')", "the reward is str 'good'", id="no number"),
    pytest.param(
        "ask('x'); leave(reward=float('nan'))", "result.json: NaN is not a finite number", id="nan"
    ),
    pytest.param("ask('x'); leave(reword=1)", "result.json: expected an object", id="result"),
    pytest.param("ask('x'); leave(rewards={'a': 1})", "there is no seat 'a'", id="no such seat"),
    pytest.param(
        "ask('x'); leave(turn_rewards=[1, 1])",
        "turn_rewards: 2 rewards, but the program was answered 1 times",
        id="no such turn",
    ),
]


@pytest.mark.parametrize(("text", "message"), FAILING)
async def test_a_program_that_fails_fails_its_sample(
    text: str, message: str, make_program: Any, tmp_path: Path
) -> None:
    program = make_program(text)
    sample = await play_program(program, Script(token_ids("hello")), tmp_path)
    assert sample.status is SampleStatus.FAILED
    assert sample.error.startswith("agent ")
    assert message in sample.error
    assert (sample.reward, sample.trainable_tokens) == (0.0, 0)
    assert left_behind(program) == []


async def test_the_last_lines_of_the_programs_errors_are_in_the_samples_error(
    make_program: Any, tmp_path: Path
) -> None:
    program = make_program("""
ask("x")
for i in range(200_000):
    print("out", i)
    print("line", i, file=sys.stderr)
sys.exit("no such tool")
""")
    sample = await play_program(program, Script(token_ids("hello")), tmp_path)
    assert sample.error.startswith("agent ended with status 1: no such tool\n")
    assert "line 199999" in sample.error
    assert len(sample.error) < 3000


TOO_LONG = """
import urllib.error
try:
    ask("a" * 5000)
except urllib.error.HTTPError as error:
    assert "context_length_exceeded" in error.read().decode()
    {then}
"""


@pytest.mark.parametrize(
    ("then", "status"),
    [
        pytest.param("sys.exit(1)", SampleStatus.TRUNCATED, id="ends there"),
        pytest.param("leave(reward=0.25); sys.exit(1)", SampleStatus.TRUNCATED, id="with a reward"),
        pytest.param("ask('short'); sys.exit(1)", SampleStatus.FAILED, id="goes on, and fails"),
        pytest.param("ask('short')", SampleStatus.COMPLETED, id="goes on"),
    ],
)
async def test_a_history_that_does_not_fit_truncates_the_sample_that_ends_with_it(
    then: str, status: SampleStatus, make_program: Any, tmp_path: Path
) -> None:
    program = make_program("ask('x')" + TOO_LONG.format(then=then))
    sample = await play_program(program, Script(token_ids("hello"), token_ids("more")), tmp_path)
    assert sample.status is status, sample.error
    if "reward" in then:
        assert sample.reward == 0.25


CHILDREN = """
mine = "while True: __import__('time').sleep(1)"
subprocess.Popen([sys.executable, "-I", "-S", "-c", mine])
subprocess.Popen([sys.executable, "-I", "-S", "-c", mine], start_new_session=True)
ask("x")
"""


async def test_a_program_that_hangs_is_ended_with_its_children(
    make_program: Any, tmp_path: Path
) -> None:
    program = make_program(CHILDREN + FOREVER)
    sample = await play_program(program, Script(token_ids("hello")), tmp_path, seconds=3.0)
    expected = "agent took more than 3 s outside of the engine (rollout.functionSeconds)"
    assert sample.error == expected
    assert left_behind(program) == []


async def test_children_are_ended_with_the_program_and_do_not_delay_it(
    make_program: Any, tmp_path: Path
) -> None:
    """The children hold the program's outputs open."""
    program = make_program(CHILDREN)
    sample = await play_program(program, Script(token_ids("hello")), tmp_path)
    assert (sample.error, sample.response) == ("", "hello")
    assert left_behind(program) == []


@pytest.mark.parametrize("how", ["drain", "lost lease"])
async def test_a_drain_or_a_lost_lease_ends_the_program_at_once(
    how: str, make_program: Any, tmp_path: Path
) -> None:
    program = make_program(CHILDREN + "leave(reward=1); pathlib.Path('there').touch()\n" + FOREVER)
    sample = Sample(0)
    async with program_runner(program, Script(token_ids("hello")), tmp_path) as runner:
        params = PARAMS | {"max_new_tokens": 100}
        running = asyncio.create_task(runner(Prompt(0, "?"), [1], sample, params))
        await until(lambda: list(Path(program._directory).glob("*/there")))
        if how == "drain":
            runner.generator.draining.set()
            await running
        else:
            running.cancel()
            await asyncio.wait({running})
        await until(lambda: left_behind(program) == [])
    assert sample.status is (SampleStatus.ABORTED if how == "drain" else SampleStatus.PENDING)
    assert sample.reward is None


async def test_a_directory_is_removed_whatever_it_contains(
    make_program: Any, tmp_path: Path
) -> None:
    program = make_program("""
ask("x")
for name in ("a", "a/b", "tmp/c"):
    os.mkdir(name)
    open(name + "/f", "w").close()
os.symlink("/", "root")
os.chmod("a", 0)
""")
    assert (await play_program(program, Script(token_ids("hello")), tmp_path)).error == ""
    assert left_behind(program) == []


def test_a_missing_program_is_an_error_before_the_first_episode(tmp_path: Path) -> None:
    spec = environment(tmp_path, command=["no-such-agent", "--fast"])
    message = "spec.rollout.environment.command: cannot run 'no-such-agent'"
    with pytest.raises(ConfigurationError, match=message):
        UserCode.load(spec)


def test_a_word_that_names_a_file_is_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()
    spec = environment(tmp_path, command=["python3", "agent.py", "--fast"], env={"MODE": "x"})
    program = program_of(spec.rollout.environment, spec)
    assert program.command == ["python3", f"{tmp_path}/agent.py", "--fast"]
    assert program.variables["MODE"] == "x"
    assert "SLUICE_TOKEN" not in program.variables


def test_the_next_worker_removes_directories_of_a_killed_one(make_program: Any) -> None:
    program = make_program("")
    abandoned = Path(f"{program._directory}-abandoned")
    (abandoned / "0.0-x").mkdir(parents=True)
    make_program("")
    assert not abandoned.exists()
    assert Path(program._directory).exists(), "its worker lives"
    assert json.dumps(os.listdir(program._directory)) == "[]"
