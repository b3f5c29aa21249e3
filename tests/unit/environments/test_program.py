"""Real programs at a real gateway, before an engine that answers what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import turn_rewards
from sluice_rollout.environments import orphan_reaper
from sluice_rollout.environments.program import Program, program_of
from sluice_rollout.user_functions.loading import UserCode
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.unit.buffer.buffer_tools import make_job
from tests.unit.gateway.test_server import desk, ids, seated
from tests.unit.rollout.test_episode import PARAMS, Script

HEAD = """
import json, os, pathlib, subprocess, sys, time, urllib.request

def ask(text, **more):
    body = {"model": "any", "messages": [{"role": "user", "content": text}], **more}
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(address, json.dumps(body).encode(), key)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def leave(**result):
    pathlib.Path(os.environ["SLUICE_EPISODE"], "result.json").write_text(json.dumps(result))
"""
FOREVER = "while True: time.sleep(1)"


@pytest.fixture
def program() -> Any:
    """Makes programs of Python texts; all are closed at the end."""
    programs: list[Program] = []

    def make(text: str) -> Program:
        variables = {"PATH": os.environ["PATH"]}
        programs.append(
            Program("agent", [sys.executable, "-I", "-S", "-c", HEAD + text], variables, "tiny", 8)
        )
        programs[-1].open()
        return programs[-1]

    yield make
    for one in programs:
        one.close()


@contextlib.asynccontextmanager
async def at_gateway(
    one: Program, engine: Script, directory: Path, seconds: float = 20.0
) -> AsyncIterator[EpisodeRunner]:
    async with desk(directory) as place:
        playing = seated(place, one, engine)
        playing.seconds, playing.name = seconds, "agent"
        yield playing


async def play(
    one: Program, engine: Script, directory: Path, tokens: int = 100, seconds: float = 20.0
) -> Sample:
    prompt = Prompt(3, "2+2", "4", {"level": 1})
    async with at_gateway(one, engine, directory, seconds) as playing:
        return await playing(prompt, [1], Sample(0), PARAMS | {"max_new_tokens": tokens})


def left_behind(one: Program) -> list[Any]:
    """Directories and processes of the program's episodes."""
    return [*os.listdir(one._directory), *orphan_reaper.marked_processes(one._directory)]


async def test_a_program_plays_and_its_result_is_the_samples(program: Any, tmp_path: Path) -> None:
    one = program("""
said = ask(os.environ["SLUICE_PROMPT"])
row = json.loads(pathlib.Path("row.json").read_text())
leave(reward={"score": 0.5, "style": 2}, metadata={"said": said, "row": row, "answer": "five"})
""")
    sample = await play(one, Script(ids("4")), tmp_path)
    assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
    assert (sample.response, sample.reward) == ("4", 0.5)
    assert sample.reward_parts == {"score": 0.5, "style": 2.0}
    assert (sample.metadata["said"], sample.metadata["answer"]) == ("4", "five")
    assert sample.metadata["row"]["label"] == "4"
    assert left_behind(one) == []


async def test_without_a_result_the_jobs_reward_judges(program: Any, tmp_path: Path) -> None:
    sample = await play(program("ask('hi')"), Script(ids("hello")), tmp_path)
    assert (sample.error, sample.reward, sample.metadata["answer"]) == ("", None, "hello")


async def test_one_that_nobody_else_rewards_has_to_give_a_reward(
    program: Any, tmp_path: Path
) -> None:
    one = program('ask("2+2")')
    one.must_reward = True
    sample = await play(one, Script(ids("4")), tmp_path)
    assert sample.error == "agent gave no reward, and the job has no spec.reward"
    one = program('ask("2+2"); leave(reward=0.0)')
    one.must_reward = True
    sample = await play(one, Script(ids("4")), tmp_path)
    assert (sample.error, sample.reward) == ("", 0.0)


async def test_a_program_plays_two_seats_and_leaves_a_reward_for_each(
    program: Any, tmp_path: Path
) -> None:
    one = program("""
opening = ask("begin", model="white")
ask(opening, model="black")
seats = json.loads(pathlib.Path("row.json").read_text())["seats"]
leave(rewards={"white": 1, "black": -1}, turn_rewards={"white": [0.5]}, metadata={"had": seats})
""")
    async with desk(tmp_path, rollout__seats=[{"name": "white"}, {"name": "black"}]) as place:
        playing = seated(place, one, Script(ids("e4"), ids("resign")))
        playing.seconds, playing.seats = 20.0, ("white", "black")
        sample = await playing(Prompt(3, "?"), [1], Sample(0), PARAMS | {"max_new_tokens": 100})
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
    text: str, message: str, program: Any, tmp_path: Path
) -> None:
    one = program(text)
    sample = await play(one, Script(ids("hello")), tmp_path)
    assert sample.status is SampleStatus.FAILED
    assert sample.error.startswith("agent ")
    assert message in sample.error
    assert (sample.reward, sample.trainable_tokens) == (0.0, 0)
    assert left_behind(one) == []


async def test_the_last_lines_of_its_errors_are_told(program: Any, tmp_path: Path) -> None:
    one = program("""
ask("x")
for i in range(200_000):
    print("out", i)
    print("line", i, file=sys.stderr)
sys.exit("no such tool")
""")
    sample = await play(one, Script(ids("hello")), tmp_path)
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
    then: str, status: SampleStatus, program: Any, tmp_path: Path
) -> None:
    one = program("ask('x')" + TOO_LONG.format(then=then))
    sample = await play(one, Script(ids("hello"), ids("more")), tmp_path)
    assert sample.status is status, sample.error
    if "reward" in then:
        assert sample.reward == 0.25


CHILDREN = """
mine = "while True: __import__('time').sleep(1)"
subprocess.Popen([sys.executable, "-I", "-S", "-c", mine])
subprocess.Popen([sys.executable, "-I", "-S", "-c", mine], start_new_session=True)
ask("x")
"""


async def test_one_that_hangs_is_ended_with_its_children(program: Any, tmp_path: Path) -> None:
    one = program(CHILDREN + FOREVER)
    sample = await play(one, Script(ids("hello")), tmp_path, seconds=3.0)
    expected = "agent took more than 3 s outside of the engine (rollout.functionSeconds)"
    assert sample.error == expected
    assert left_behind(one) == []


async def test_children_do_not_outlive_it_nor_hold_it_up(program: Any, tmp_path: Path) -> None:
    """They hold its outputs open."""
    one = program(CHILDREN)
    sample = await play(one, Script(ids("hello")), tmp_path)
    assert (sample.error, sample.response) == ("", "hello")
    assert left_behind(one) == []


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["drain", "lost lease"])
async def test_a_drain_or_a_lost_lease_ends_it_at_once(
    how: str, program: Any, tmp_path: Path
) -> None:
    one = program(CHILDREN + "leave(reward=1); pathlib.Path('there').touch()\n" + FOREVER)
    sample = Sample(0)
    async with at_gateway(one, Script(ids("hello")), tmp_path) as playing:
        params = PARAMS | {"max_new_tokens": 100}
        running = asyncio.create_task(playing(Prompt(0, "?"), [1], sample, params))
        await until(lambda: list(Path(one._directory).glob("*/there")))
        if how == "drain":
            playing.generator.draining.set()
            await running
        else:
            running.cancel()
            await asyncio.wait({running})
        await until(lambda: left_behind(one) == [])
    assert sample.status is (SampleStatus.ABORTED if how == "drain" else SampleStatus.PENDING)
    assert sample.reward is None


async def test_its_directory_may_be_any_mess(program: Any, tmp_path: Path) -> None:
    one = program("""
ask("x")
for name in ("a", "a/b", "tmp/c"):
    os.mkdir(name)
    open(name + "/f", "w").close()
os.symlink("/", "root")
os.chmod("a", 0)
""")
    assert (await play(one, Script(ids("hello")), tmp_path)).error == ""
    assert left_behind(one) == []


def environment(directory: Path, **changes: Any) -> Any:
    settings = {f"rollout__environment__{name}": value for name, value in changes.items()}
    return make_job(directory, **settings).spec


def test_a_program_that_is_not_there_is_said_before_any_episode(tmp_path: Path) -> None:
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
    one = program_of(spec.rollout.environment, spec)
    assert one.command == ["python3", f"{tmp_path}/agent.py", "--fast"]
    assert one.variables["MODE"] == "x"
    assert "SLUICE_TOKEN" not in one.variables


def test_what_a_killed_worker_has_left_goes_with_the_next_ones_start(program: Any) -> None:
    one = program("")
    abandoned = Path(f"{one._directory}-abandoned")
    (abandoned / "0.0-x").mkdir(parents=True)
    program("")
    assert not abandoned.exists()
    assert Path(one._directory).exists(), "its worker lives"
    assert json.dumps(os.listdir(one._directory)) == "[]"
