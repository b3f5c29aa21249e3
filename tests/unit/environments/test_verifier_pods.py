"""A verifier in pods, with a scripted engine. Containers are processes here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.samples.episode_protocol import VERIFIER
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.environments.pod_pool import EpisodePodError
from sluice_rollout.environments.pods import EpisodePods
from sluice_rollout.environments.verifying import VerifierRules
from sluice_rollout.gateway.registry import EpisodeRegistry, PodAddress
from sluice_rollout.gateway.server import LOOPBACK
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests import chat
from tests.integration.rollout.pod_process import SECONDS, TOKEN, Pod
from tests.unit.buffer.buffer_tools import make_job
from tests.unit.environments.program_tools import FOREVER, python_command
from tests.unit.gateway.gateway_tools import episode_runner, token_ids
from tests.unit.rollout.scripted_engine import PARAMS, Script

ROW = Prompt(0, "?", label="0.5", metadata={"level": 1, "tests": "hidden"})
RULES = VerifierRules(SECONDS, frozenset({"tests"}))
LEAVE = """
out = pathlib.Path(os.environ["SLUICE_ARTIFACTS"])
ask("x")
(out / "deep").mkdir()
row = pathlib.Path(os.environ["SLUICE_EPISODE"], "row.json").read_text()
(out / "deep/row.json").write_text(row)
leave(reward=1, metadata={"won": True})
"""
JUDGE = """
seen = pathlib.Path(os.environ["SLUICE_ARTIFACTS"], "deep/row.json").read_text()
row = json.loads(pathlib.Path(os.environ["SLUICE_EPISODE"], "row.json").read_text())
told = [row["label"], os.environ["SLUICE_LABEL"], row["metadata"]["tests"]]
leave(reward=float(row["label"]) / 2, metadata={"seen": json.loads(seen), "told": told})
"""


@contextlib.asynccontextmanager
async def worker(
    directory: Path, rules: VerifierRules = RULES
) -> AsyncIterator[tuple[EpisodeRunner, str]]:
    """Make a runner whose episodes are pods with a verifier. Yields it with the address to join."""
    model = directory / "model"
    chat.save(model)
    environment = {"command": ["agent"], "image": "agent:1"}
    spec = make_job(directory, model__path=str(model), rollout__environment=environment).spec
    pods = EpisodePods.create(TOKEN, 2 * SECONDS, "kubectl", rules)
    async with EpisodeRegistry.for_job(
        spec, PromptEncoder(spec, model), PodAddress(LOOPBACK, 0, pods.join)
    ) as registry:
        runner = episode_runner(registry, pods, Script(token_ids("hello")))
        runner.name, runner.seconds = "the program", SECONDS
        yield runner, f"http://{LOOPBACK}:{registry.server.port}"


async def play(runner: EpisodeRunner) -> Sample:
    return await runner(ROW, [1], Sample(0), PARAMS | {"max_new_tokens": 100})


async def judged(directory: Path, text: str, judge: str, rules: VerifierRules = RULES) -> Sample:
    """Play an episode of a program and a verifier, and check that their pods have ended."""
    async with worker(directory, rules) as (runner, address):
        with (
            Pod(directory / "pod", address, python_command(text)) as pod,
            Pod(directory / "verifier", address, python_command(judge), VERIFIER) as verifier,
        ):
            sample = await play(runner)
            assert await pod.ends() == 0
            if "verifier" in sample.error or not sample.error:
                assert await verifier.ends() == 0
            return sample


async def test_a_verifier_judges_in_a_separate_pod(tmp_path: Path) -> None:
    """The program leaves the row that it has seen, and a result that is ignored."""
    sample = await judged(tmp_path, LEAVE, JUDGE)
    assert (sample.error, sample.reward) == ("", 0.25)
    seen = sample.metadata["seen"]
    assert (seen["label"], seen["metadata"]) == (None, {"level": 1})
    assert sample.metadata["told"] == ["0.5", "0.5", "hidden"]
    assert "won" not in sample.metadata


STATUS = """
ask("x")
pathlib.Path(os.environ["SLUICE_EPISODE"], ".status").write_text("9" * 5000)
"""
LINK = """
ask("x")
os.symlink("/etc/passwd", os.environ["SLUICE_ARTIFACTS"] + "/x")
"""


@pytest.mark.parametrize(
    ("text", "judge", "rules", "message"),
    [
        pytest.param(LINK, JUDGE, RULES, "left artifacts that cannot be handed on: art", id="link"),
        pytest.param(
            STATUS + FOREVER, JUDGE, RULES, "the program ended with status 1", id="own status"
        ),
        pytest.param(
            LEAVE,
            "sys.exit('no such test')",
            RULES,
            "has a verifier that ended with status 1: no such test",
            id="a verifier that fails",
        ),
        pytest.param(
            LEAVE,
            FOREVER,
            VerifierRules(1.0),
            "has a verifier that took more than 1 s",
            id="that hangs",
        ),
    ],
)
async def test_a_sample_that_cannot_be_judged_fails(
    text: str, judge: str, rules: VerifierRules, message: str, tmp_path: Path
) -> None:
    sample = await judged(tmp_path, text, judge, rules)
    assert sample.status is SampleStatus.FAILED
    assert message in sample.error


async def test_a_lost_verifier_pod_does_not_fail_the_sample(tmp_path: Path) -> None:
    async with worker(tmp_path) as (runner, address):
        with (
            Pod(tmp_path / "pod", address, python_command(LEAVE)),
            Pod(tmp_path / "verifier", address, python_command(FOREVER), VERIFIER) as verifier,
        ):
            playing = asyncio.create_task(play(runner))
            await verifier.plays()
            verifier.sidecar.kill()
            with pytest.raises(EpisodePodError, match="job-verifier-0-1-0-1 was lost before"):
                await playing
