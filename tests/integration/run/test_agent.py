"""The example of an agent, on the real engines: its program plays every sample of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.samples.sample import Sample
from sluice.telemetry import rollouts
from tests.integration.run.laptop import ROOT, Laptop
from tests.tools import VERIFIERS_PYTHON, missing

# Two agents side by side in one episode, so that its conversation is a tree.
TWICE = """
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from play import agent

async def play(episode):
    question = str(episode.prompt.prompt)
    async with episode.gateway.openai() as client:
        tries = [agent.solve(client, question) for _ in range(2)]
        answers = await asyncio.gather(*tries, return_exceptions=True)
    episode.metadata["said"] = next((said for said in answers if isinstance(said, str)), "")
"""

IN_IMAGE = ROOT / "examples/agents/image/run.py"


@pytest.fixture
def interpreter() -> Path:
    """The one that has verifiers."""
    if not VERIFIERS_PYTHON.exists():
        missing("needs verifiers: make agents")
    return VERIFIERS_PYTHON


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the example (default: openai), with its data made."""
    directory = tmp_path / "agent"
    ignored = shutil.ignore_patterns("*.jsonl", "model", "__pycache__")
    name = getattr(request, "param", "openai")
    shutil.copytree(ROOT / "examples/agents" / name, directory, ignore=ignored)
    program = ROOT / "examples/agents" / name / "make_data.py"
    subprocess.run([sys.executable, str(program), str(directory)], check=True, timeout=300)
    return directory


def trained(run: Laptop) -> dict[int, list[Sample]]:
    """The samples of each step."""
    return {
        step: [sample for group in rollouts.read(path) for sample in group.samples]
        for step, path in rollouts.steps(run.directory / "rollouts").items()
    }


def requests(run: Laptop) -> float:
    """Requests that the gateway has answered."""
    targets = json.loads((run.directory / "targets.json").read_text())
    worker = next(t["targets"][0] for t in targets if t["labels"]["role"] == "rollout")
    with urllib.request.urlopen(f"http://{worker}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    name = "sluice_rollout_gateway_requests_total"
    return sum(s.value for family in families for s in family.samples if s.name == name)


def test_an_agent_plays_as_it_is(example: Path, tmp_path: Path) -> None:
    settings = ("trainer.steps=3", "evaluation=null", "debug.dumpRollouts=true")
    run = Laptop(example, tmp_path / "run", *settings)
    assert run.run() == 0, run.text()[-3000:]
    samples = [sample for of_step in trained(run).values() for sample in of_step]
    assert len(samples) == 3 * 8 * 8
    assert {sample.error for sample in samples} == {""}
    answered = [sample for sample in samples if len(sample.metadata["turns"]) == 3]
    assert answered, "two words in thirty are calls"
    for sample in answered:
        called, tool, said = (turn["length"] for turn in sample.metadata["turns"])
        # The end of the turn, the mark and the tool's answer behind it are the environment's.
        assert tool == 3
        assert sample.loss_mask.tolist() == [1] * called + [0] * tool + [1] * said
    for record in run.steps().values():
        assert record["train/train_rollout_logprob_abs_diff_max"] < 1e-4


@pytest.mark.long
def test_an_agent_is_a_program_for_each_episode(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that the example has in an image."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    run = Laptop(
        example,
        tmp_path / "run",
        "rollout.function=null",
        f"rollout.environment.command=[{sys.executable}, {IN_IMAGE}]",
        "trainer.steps=2",
        "rollout.batchSize=4",
        "rollout.samplesPerPrompt=4",
        "evaluation=null",
        "debug.dumpRollouts=true",
    )
    assert run.run() == 0, run.text()[-3000:]
    samples = [sample for of_step in trained(run).values() for sample in of_step]
    assert len(samples) == 2 * 4 * 4
    assert {sample.error for sample in samples} == {""}
    answered = [sample for sample in samples if sample.status.value != "truncated"]
    assert all("said" in sample.metadata for sample in answered)
    for record in run.steps().values():
        assert record["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    assert not list(place.glob("sluice-episodes-*"))


@pytest.mark.parametrize("example", ["code"], indirect=True)
@pytest.mark.long
def test_an_agent_writes_code_reads_its_error_and_tries_again(
    example: Path, tmp_path: Path
) -> None:
    settings = ("trainer.steps=2", "rollout.batchSize=4", "rollout.samplesPerPrompt=4")
    run = Laptop(example, tmp_path / "run", *settings, "evaluation=null", "debug.dumpRollouts=true")
    assert run.run() == 0, run.text()[-3000:]
    samples = [sample for of_step in trained(run).values() for sample in of_step]
    assert {sample.error for sample in samples} == {""}
    again = [sample for sample in samples if len(sample.metadata["turns"]) == 3]
    assert again, "a third of the words are programs"
    assert all(sample.reward in (0.2, 1.0) for sample in again)


@pytest.mark.parametrize("example", ["search"], indirect=True)
@pytest.mark.long
def test_an_agent_searches_and_reads_what_comes_back(example: Path, tmp_path: Path) -> None:
    settings = ("trainer.steps=2", "rollout.batchSize=8", "rollout.samplesPerPrompt=8")
    run = Laptop(example, tmp_path / "run", *settings, "evaluation=null", "debug.dumpRollouts=true")
    assert run.run() == 0, run.text()[-3000:]
    samples = [sample for of_step in trained(run).values() for sample in of_step]
    assert {sample.error for sample in samples} == {""}
    searched = [sample for sample in samples if sample.metadata.get("passage")]
    assert searched, "four words in twenty-six are queries"
    rows = (example / "corpus.jsonl").read_text().splitlines()
    passages = {json.loads(row)["text"] for row in rows}
    assert all(s.metadata["passage"].partition(") ")[2] in passages for s in searched)
    assert all(sample.reward == 0 for sample in samples if not sample.metadata.get("passage"))


@pytest.mark.parametrize("example", ["verifiers"], indirect=True)
@pytest.mark.long
def test_an_environment_of_verifiers_is_trained_by_its_name(
    interpreter: Path, example: Path, tmp_path: Path
) -> None:
    run = Laptop(
        example,
        tmp_path / "run",
        f"rollout.environment.verifiers.python={interpreter}",
        f"rollout.environment.env={{PYTHONPATH: {example}}}",
        "trainer.steps=2",
        "rollout.batchSize=4",
        "rollout.samplesPerPrompt=8",
        "evaluation=null",
        "debug.dumpRollouts=true",
    )
    assert run.run() == 0, run.text()[-3000:]
    samples = [sample for of_step in trained(run).values() for sample in of_step]
    assert {sample.error for sample in samples} == {""}
    judged = [sample for sample in samples if "right" in sample.reward_parts]
    assert all(sample.reward == sample.reward_parts["right"] for sample in judged)
    assert all(sample.reward == 0 for sample in judged if not sample.reward_parts["calls"])
    assert any(sample.reward_parts["calls"] for sample in judged), "two words in thirty are calls"
    full = [sample for sample in samples if "right" not in sample.reward_parts]
    assert {(sample.status.value, sample.reward) for sample in full} <= {("truncated", 0.0)}


@pytest.mark.timeout(900)
@pytest.mark.long
def test_the_trainer_may_be_killed_while_agents_play(example: Path, tmp_path: Path) -> None:
    """Every sample of the episodes' trees is trained once.

    Steps that are trained again after a checkpoint are the same.
    """
    (example / "twice.py").write_text(TWICE)
    steps, prompts, samples = 6, 8, 4
    run = Laptop(
        example,
        tmp_path / "run",
        f"rollout.function={example}/twice.py:play",
        f"trainer.steps={steps}",
        f"rollout.batchSize={prompts}",
        f"rollout.samplesPerPrompt={samples}",
        "checkpoint.everySteps=2",
        "evaluation=null",
        "debug.dumpRollouts=true",
    )
    run.start()
    try:
        run.until_step(3)
        before = requests(run)
        run.until(lambda: requests(run) > before, "an agent that plays", 60)
        run.kill("trainer")
        assert run.wait(600) == 0, run.text()[-3000:]
    finally:
        run.stop()
    summary = run.summary()
    assert (summary["state"], summary["steps"]) == ("Succeeded", steps)
    for name in ("groups_lost", "groups_trained_twice", "groups_failed"):
        assert summary[name] == 0
    assert summary["groups_trained"] == summary["groups_leased"] == steps * prompts
    assert 3 in run.replayed()
    for records in run.replayed().values():
        assert len({(r["train/loss"], r["train/grad_norm"]) for r in records}) == 1
    for of_step in trained(run).values():
        assert len(of_step) == prompts * samples
        assert all(sample.branches for sample in of_step)
    for record in run.steps().values():
        assert record["multi_turn/branches/mean"] >= 2
        assert record["train/train_rollout_logprob_abs_diff_max"] < 1e-4
