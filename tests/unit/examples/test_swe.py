"""examples/swe: the reference patch of each repository resolves it, and nothing else does."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.rewards import RewardInput
from sluice.rewards.builtin.swe import swe
from sluice.samples.sample import Prompt
from tests.tools import ROOT
from tests.unit.environments.test_verifier import JudgedProgram
from tests.unit.examples.scripted_shell_agent import agent_program, verifier_program

SWE = ROOT / "examples/swe"
TASKS: list[Any] = runpy.run_path(str(SWE / "bugs.py"))["TASKS"]
HIDDEN = frozenset({"FAIL_TO_PASS", "PASS_TO_PASS", "test_files"})


@pytest.fixture(scope="module")
def swe_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder with its data."""
    directory: Path = tmp_path_factory.mktemp("swe") / "swe"
    shutil.copytree(SWE, directory)
    subprocess.run([sys.executable, "make_data.py"], cwd=directory, check=True)
    return directory


@pytest.fixture(scope="module")
def rows(swe_set: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in (swe_set / "train.jsonl").read_text().splitlines()]
    return {row["metadata"]["instance_id"]: row for row in found}


def judged(
    swe_set: Path, row: dict[str, Any], patch: str, directory: Path, *options: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the reward of a patch, and what the verifier has left."""
    artifacts = directory / "artifacts"
    artifacts.mkdir(parents=True)
    (artifacts / "patch.diff").write_text(patch)
    (directory / "row.json").write_text(json.dumps(row))
    subprocess.run(
        [sys.executable, str(swe_set / "verify.py"), *options],
        env=os.environ | {"SLUICE_EPISODE": str(directory), "SLUICE_ARTIFACTS": str(artifacts)},
        check=True,
        stderr=subprocess.DEVNULL,
    )
    left: dict[str, Any] = json.loads((directory / "result.json").read_text())["metadata"]
    return swe(RewardInput(row["prompt"], "", metadata=row["metadata"] | left)), left


@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.long)], ids=["two", "all"])
def test_only_the_reference_patch_resolves_an_issue(
    count: int, swe_set: Path, rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert len(rows) == len(TASKS) == 12
    for task in TASKS[:count]:
        row = rows[task.name]
        assert row["metadata"]["PASS_TO_PASS"], task.name
        right, _ = judged(swe_set, row, task.patch, tmp_path / task.name)
        empty, _ = judged(swe_set, row, "", tmp_path / f"{task.name}-empty")
        assert right == {"score": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0}, task.name
        assert empty == {"score": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0}, task.name


BREAKS = """\
--- a/intervals/merging.py
+++ b/intervals/merging.py
@@ -4,2 +4,3 @@
 def merge(intervals):
+    return [(1, 3)]
     merged = []
"""
EDITS_TESTS = """\
--- a/tests/test_all.py
+++ b/tests/test_all.py
@@ -1,3 +1,5 @@
-import unittest
+import unittest
+class Tests(unittest.TestCase):
+    def test_touching(self): pass
\x20
 from intervals import merge
--- /dev/null
+++ b/tests/test_more.py
@@ -0,0 +1,4 @@
+import unittest
+class Tests(unittest.TestCase):
+    def test_touching(self):
+        pass
"""
HANGS = BREAKS.replace("return [(1, 3)]", "while True: pass")


@pytest.mark.parametrize(
    ("patch", "repaired", "kept", "applied"),
    [
        pytest.param(BREAKS, 1.0, 0.0, True, id="it breaks other tests"),
        pytest.param(EDITS_TESTS, 0.0, 1.0, True, id="it edits the tests"),
        pytest.param(HANGS, 0.0, 0.0, True, id="the tests hang"),
        pytest.param("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", 0.0, 0.0, False, id="no such file"),
        pytest.param("nonsense", 0.0, 0.0, False, id="no patch"),
        pytest.param(
            "--- /dev/null\n+++ b/../../out\n@@ -0,0 +1 @@\n+x\n", 0.0, 0.0, False, id="outside"
        ),
    ],
)
def test_a_wrong_patch_scores_zero(
    patch: str,
    repaired: float,
    kept: float,
    applied: bool,
    swe_set: Path,
    rows: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    directory = tmp_path / "deep/episode"
    reward, left = judged(swe_set, rows["intervals"], patch, directory, "--seconds", "3")
    assert reward == {"score": 0.0, "fail_to_pass": repaired, "pass_to_pass": kept}
    assert left["patch_applied"] is applied
    assert not (tmp_path / "out").exists()


def test_the_output_is_kept_by_its_hash(
    swe_set: Path, rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    _, left = judged(swe_set, rows["dates"], "", tmp_path / "episode", "--logs", str(logs))
    assert (logs / f"{left['test_log_sha256']}.log").read_text() == left["test_log"]


REPAIRS = "sed -i 's/start < merged/start <= merged/' intervals/merging.py"


async def test_the_agent_and_the_verifier_play_an_episode(
    swe_set: Path, rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """The agent's program is the example's; what the model says is scripted."""
    row = rows["intervals"]
    agent = agent_program(swe_set, REPAIRS)
    program = JudgedProgram(agent, verifier_program(swe_set), hidden=HIDDEN, must_reward=False)
    sample = await program.play(tmp_path, Prompt(3, row["prompt"], None, row["metadata"]))
    assert sample.error == ""
    assert sample.metadata["patch_applied"]
    judged = RewardInput(row["prompt"], "", metadata=row["metadata"] | sample.metadata)
    assert swe(judged)["score"] == 1.0
