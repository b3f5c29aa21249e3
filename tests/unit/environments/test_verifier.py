"""A verifier judges what a program has left, whatever the program does."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.environments.program import Program, program_of
from sluice_rollout.environments.verifying import VerifierProcess, VerifierRules
from sluice_rollout.episode import Episode
from sluice_rollout.user_functions.time_limit import TimeLimit
from tests.tools import ROOT
from tests.unit.buffer.buffer_tools import make_job
from tests.unit.environments.program_tools import (
    FOREVER,
    environment,
    left_behind,
    program_runner,
    python_command,
    until,
)
from tests.unit.gateway.gateway_tools import token_ids
from tests.unit.rollout.scripted_engine import PARAMS, Script

JUDGE = """
row = json.loads(pathlib.Path("row.json").read_text())
answer = pathlib.Path(os.environ["SLUICE_ARTIFACTS"], "answer.txt")
right = answer.exists() and answer.read_text() == row["label"] == os.environ["SLUICE_LABEL"]
leave(reward=float(right), metadata={"tests": row["metadata"]["tests"]})
"""
PROMPT = Prompt(3, "2+2", "4", {"level": 1, "tests": "hidden"})


class JudgedProgram(Program):
    """A program with a verifier, from Python texts."""

    def __init__(self, text: str, judge: str = JUDGE, **rules: Any) -> None:
        rules = {"seconds": 20.0, "hidden": frozenset({"tests"}), **rules}
        variables = {"PATH": os.environ["PATH"]}
        verifier = VerifierProcess(python_command(judge), variables, VerifierRules(**rules))
        super().__init__("agent", python_command(text), variables, "tiny", 8, verifier=verifier)

    async def play(self, directory: Path, prompt: Prompt = PROMPT) -> Sample:
        """Play an episode, and check that its files and processes are gone."""
        try:
            async with program_runner(
                self, Script(token_ids("4"), token_ids("4")), directory
            ) as runner:
                params = PARAMS | {"max_new_tokens": 100}
                sample = await runner(prompt, [1], Sample(0), params)
            assert left_behind(self) == []
            return sample
        finally:
            self.close()


ANSWER = """
out = pathlib.Path(os.environ["SLUICE_ARTIFACTS"])
ask("x")
(out / "answer.txt").write_text("4")
"""
WRONG = ANSWER.replace('"4"', '"5"')


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        pytest.param(ANSWER, 1.0, id="right"),
        pytest.param(WRONG, 0.0, id="wrong"),
        pytest.param("ask('x')", 0.0, id="nothing is left"),
    ],
)
async def test_the_verifier_gives_the_reward(text: str, reward: float, tmp_path: Path) -> None:
    sample = await JudgedProgram(text).play(tmp_path)
    assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
    assert (sample.reward, sample.metadata["tests"]) == (reward, "hidden")


async def test_the_program_does_not_see_label_and_hidden_metadata(tmp_path: Path) -> None:
    seen = """
row = pathlib.Path("row.json").read_text()
ask("x")
(pathlib.Path("artifacts") / "seen").write_text(row + os.environ["SLUICE_LABEL"])
"""
    judge = """
leave(reward=1, metadata={"seen": pathlib.Path("artifacts/seen").read_text(),
    "variables": sorted(os.environ), "address": os.environ.get("OPENAI_BASE_URL")})
"""
    sample = await JudgedProgram(seen, judge).play(tmp_path)
    assert '"label": null' in sample.metadata["seen"]
    assert '"metadata": {"level": 1}' in sample.metadata["seen"]
    assert sample.metadata["address"] is None, "and the verifier has no way to the model"
    assert not [name for name in sample.metadata["variables"] if "KEY" in name]


ATTACKS = [
    pytest.param("leave(reward=1, metadata={'won': True})", id="a result of its own"),
    pytest.param("(out / 'result.json').write_text('{\"reward\": 1}')", id="a result handed on"),
    pytest.param("(out / 'row.json').write_text('{\"label\": \"5\"}')", id="a row handed on"),
    pytest.param(
        """
code = '''
import glob, json, time
while True:
    for kind in ("row", "result"):
        for file in glob.glob("../*verifier*/" + kind + ".json"):
            open(file, "w").write(json.dumps({"reward": 1, "label": "5"}))
'''
for session in (False, True):
    subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=session)
""",
        id="processes that stay",
    ),
    pytest.param(
        """
for number in range(100):
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.01)
""",
        id="a child after another",
    ),
    pytest.param("os.chmod('.', 0); os.chmod('artifacts', 0o700)", id="a directory that is locked"),
]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_program_cannot_change_its_reward(attack: str, tmp_path: Path) -> None:
    sample = await JudgedProgram(WRONG + attack).play(tmp_path)
    assert (sample.error, sample.reward) == ("", 0.0)
    assert "won" not in sample.metadata


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        pytest.param("(out / 'x').symlink_to('/etc/passwd')", "artifacts/x: expected", id="link"),
        pytest.param("(out / 'x').symlink_to('/dev/zero')", "artifacts/x: expected", id="device"),
        pytest.param("os.mkfifo(out / 'x')", "artifacts/x: expected a plain file", id="pipe"),
        pytest.param(
            "with open(out / 'x', 'wb') as file: file.truncate(10 << 30)", "at most", id="10 GiB"
        ),
        pytest.param(
            "for _ in range(1000): os.mkdir('d'); os.chdir('d')",
            "",
            id="deep elsewhere",
        ),
        pytest.param(
            "os.chdir(out)\nfor _ in range(1000): os.mkdir('d'); os.chdir('d')",
            "at most 16 levels",
            id="deep",
        ),
        pytest.param("for n in range(2000): (out / str(n)).touch()", "at most 1000", id="many"),
    ],
)
async def test_hostile_artifacts_are_read_or_refused(
    attack: str, message: str, tmp_path: Path
) -> None:
    sample = await JudgedProgram(ANSWER + attack).play(tmp_path)
    if message:
        assert sample.error.startswith("agent left artifacts that cannot be handed on: ")
        assert message in sample.error
    else:
        assert (sample.error, sample.reward) == ("", 1.0)


@pytest.mark.parametrize(
    ("judge", "rules", "message"),
    [
        pytest.param("sys.exit('no tests')", {}, "ended with status 1: no tests", id="status"),
        pytest.param("os.kill(os.getpid(), 9)", {}, "was ended by SIGKILL", id="killed"),
        pytest.param(FOREVER, {"seconds": 0.5}, "took more than 0.5 s (rollout.env", id="hangs"),
        pytest.param("leave(reward='1')", {}, "left a result that cannot be read", id="broken"),
        pytest.param("leave()", {}, "left no reward in result.json", id="no reward"),
        pytest.param("os.symlink('/dev/zero', 'result.json')", {}, "expected a plain", id="link"),
    ],
)
async def test_a_verifier_that_fails_fails_the_sample(
    judge: str, rules: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sample = await JudgedProgram(ANSWER, judge, **rules).play(tmp_path)
    assert sample.status is SampleStatus.FAILED
    assert sample.error.startswith("agent has a verifier that ")
    assert message in sample.error


async def test_the_jobs_reward_judges_if_the_verifier_gives_none(tmp_path: Path) -> None:
    sample = await JudgedProgram(ANSWER, "leave(metadata={'passed': 3})", must_reward=False).play(
        tmp_path
    )
    assert (sample.error, sample.reward, sample.metadata["passed"]) == ("", None, 3)


async def test_the_verifiers_time_does_not_count_as_the_programs() -> None:
    time_limit = TimeLimit(0.02)
    episode: Any = Episode(PROMPT, Sample(0), None, {}, None, time_limit)  # type: ignore[arg-type]
    async with asyncio.timeout(None) as limit:
        time_limit.start(limit)
        async with VerifierRules(60.0).limited(episode):
            assert time_limit.idle.is_set(), "and a drain does not wait for it"
            await asyncio.sleep(0.1)
    assert not time_limit.expired


async def test_artifacts_of_a_failed_program_are_not_judged(tmp_path: Path) -> None:
    sample = await JudgedProgram(ANSWER + "sys.exit(3)").play(tmp_path)
    assert sample.error == "agent ended with status 3"


async def test_a_drain_does_not_wait_for_the_verifier(tmp_path: Path) -> None:
    program = JudgedProgram(ANSWER, "pathlib.Path('there').touch()\n" + FOREVER, seconds=600.0)
    sample = Sample(0)
    try:
        async with program_runner(program, Script(token_ids("4")), tmp_path) as runner:
            params = PARAMS | {"max_new_tokens": 100}
            running = asyncio.create_task(runner(PROMPT, [1], sample, params))
            await until(lambda: list(Path(program._directory).glob("*verifier*/there")))
            runner.generator.draining.set()
            await running
            assert left_behind(program) == []
    finally:
        program.close()
    assert (sample.status, sample.reward) == (SampleStatus.ABORTED, None)


PATCH = """
patch = ["--- a/sums.py", "+++ b/sums.py", "@@ -1,2 +1,2 @@", " def add(a, b):", "-    return a",
         "+    return a + BY", ""]
(out / "patch.diff").write_text("\\n".join(patch).replace("BY", "%s"))
"""
TESTS = "import sums, unittest\nclass T(unittest.TestCase):\n    def test(self):\n        "


@pytest.mark.parametrize(
    ("patch", "reward"),
    [
        pytest.param(PATCH % "b", 1.0, id="right"),
        pytest.param(PATCH % "1", 0.0, id="wrong"),
        pytest.param("", 0.0, id="none"),
    ],
)
async def test_the_verifier_of_the_page_judges_patches(
    patch: str, reward: float, tmp_path: Path
) -> None:
    page = (ROOT / "docs/agents/programs.md").read_text().partition("\n## A verifier\n")[2]
    file, repository = tmp_path / "verify.py", tmp_path / "repository"
    file.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    repository.mkdir()
    (repository / "sums.py").write_text("def add(a, b):\n    return a\n")
    tests = TESTS + "self.assertEqual(sums.add(2, 3), 5)"
    program = JudgedProgram(f"out = pathlib.Path('artifacts')\nask('x')\n{patch}", "")
    command = [sys.executable, str(file), str(repository)]
    program.verifier = VerifierProcess(command, program.variables, VerifierRules(60.0))
    sample = await program.play(tmp_path, Prompt(0, "?", metadata={"tests": tests}))
    assert (sample.error, sample.reward) == ("", reward)


def test_a_missing_verifier_is_an_error_before_the_first_episode(tmp_path: Path) -> None:
    spec = environment(tmp_path, command=["python3"], verifier={"command": ["no-such-judge"]})
    message = "environment.verifier.command: cannot run 'no-such-judge'"
    with pytest.raises(ConfigurationError, match=message):
        program_of(spec.rollout.environment, spec)


@pytest.mark.parametrize(
    ("reward", "must_reward"),
    [
        pytest.param({"type": "exact_match"}, False, id="with one"),
        pytest.param(None, True, id="without"),
    ],
)
def test_a_job_without_a_reward_needs_the_verifiers(
    reward: dict[str, Any] | None, must_reward: bool, tmp_path: Path
) -> None:
    spec = environment(tmp_path, command=["python3"], verifier={"command": ["python3"]})
    spec = spec.model_copy(
        update={"reward": reward and make_job(tmp_path, reward=reward).spec.reward}
    )
    verifier = program_of(spec.rollout.environment, spec).verifier
    assert verifier is not None
    assert verifier.rules.must_reward is must_reward
