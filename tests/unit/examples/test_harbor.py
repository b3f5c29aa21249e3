"""examples/harbor: an agent solves tasks, tests/test.sh judges what it has changed."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.data.files import read_source
from sluice.samples.sample import Prompt
from tests.tools import ROOT
from tests.unit.environments.test_verifier import JudgedProgram
from tests.unit.examples.scripted_shell_agent import agent_program, verifier_program

HARBOR = ROOT / "examples/harbor"
TASKS = {task.name: task for task in runpy.run_path(str(HARBOR / "make_data.py"))["TASKS"]}
HIDDEN = frozenset({"test_files", "verifier_env"})
FULL = {"score": 1.0, "reward": 1.0}


@pytest.fixture(scope="module")
def harbor_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder with its tasks."""
    directory: Path = tmp_path_factory.mktemp("harbor") / "harbor"
    shutil.copytree(HARBOR, directory, ignore=shutil.ignore_patterns("tasks"))
    subprocess.run([sys.executable, "make_data.py"], cwd=directory, check=True)
    return directory


@pytest.fixture(scope="module")
def rows(harbor_set: Path) -> dict[str, dict[str, Any]]:
    found = [located.row for located in read_source(str(harbor_set / "tasks"))]
    return {row["metadata"]["instance_id"]: row for row in found}


@pytest.mark.parametrize(
    ("name", "commands", "reward"),
    [
        *(
            pytest.param(name, task.solution, 1.0, id=f"{name}: solved")
            for name, task in TASKS.items()
        ),
        pytest.param("hello-file", "echo Hi > hello.txt", 0.0, id="hello-file: wrong"),
        pytest.param("join-pieces", "cat pieces/* > whole.bin", 0.0, id="join-pieces: not removed"),
        pytest.param(
            "count-words", """echo '{"total": 8, "the": 3}' > counts.json""", 0.6, id="a part"
        ),
        pytest.param("count-words", "true", 0.0, id="count-words: nothing done"),
    ],
)
async def test_the_agent_and_the_verifier_play_an_episode(
    name: str,
    commands: str,
    reward: float,
    harbor_set: Path,
    rows: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    """The programs are the example's; what the model says is scripted."""
    row = rows[name]
    agent = agent_program(harbor_set, commands)
    program = JudgedProgram(agent, verifier_program(harbor_set), hidden=HIDDEN)
    sample = await program.play(tmp_path, Prompt(3, row["prompt"], None, row["metadata"]))
    assert sample.error == ""
    assert sample.reward == pytest.approx(reward)
    assert sample.metadata["changes_applied"]


@pytest.fixture
def verify(
    harbor_set: Path, rows: dict[str, dict[str, Any]], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the verifier over files in `artifacts` of `tmp_path`, with another script of tests."""

    def run(script: str, *options: str, **about: Any) -> subprocess.CompletedProcess[str]:
        (tmp_path / "artifacts").mkdir(exist_ok=True)
        row = rows["hello-file"]
        metadata = row["metadata"] | {"test_files": {"test.sh": {"text": script}}} | about
        (tmp_path / "row.json").write_text(json.dumps(row | {"metadata": metadata}))
        places = {"SLUICE_EPISODE": str(tmp_path), "SLUICE_ARTIFACTS": f"{tmp_path}/artifacts"}
        command = [sys.executable, str(harbor_set / "verify.py"), *options]
        return subprocess.run(command, env=os.environ | places, capture_output=True, text=True)

    return run


def left(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        pytest.param("echo 1 > $D/reward.txt", FULL, id="text"),
        pytest.param("echo ' 0.25' > $D/reward.txt", {"score": 0.25, "reward": 0.25}, id="spaces"),
        pytest.param("echo 1 > $D/reward.txt; exit 3", FULL, id="an exit status is not read"),
        pytest.param(
            """echo '{"speed": 0.5}' > $D/reward.json; echo 1 > $D/reward.txt""",
            {"score": 0.5, "speed": 0.5},
            id="JSON comes first",
        ),
        pytest.param("sleep 600", {"score": 0.0}, id="too late"),
        pytest.param("[ $GREETING = hi ] && echo 1 > $D/reward.txt", FULL, id="variables"),
    ],
)
def test_the_reward_is_what_the_tests_leave(
    script: str,
    reward: dict[str, float],
    verify: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    variables = {"GREETING": "${NOT_SET_ANYWHERE:-hi}"}
    done = verify(f"D=$LOGS_DIR/verifier\n{script}\n", "--seconds", "2", verifier_env=variables)
    assert done.returncode == 0, done.stderr
    assert left(tmp_path)["reward"] == reward


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param("echo broken", "left neither", id="no reward"),
        pytest.param("echo nan > $D/reward.txt", "found nan", id="not finite"),
        pytest.param("echo yes > $D/reward.txt", "could not convert", id="no number"),
        pytest.param(": > $D/reward.json", "Expecting value", id="empty"),
        pytest.param("echo '[1]' > $D/reward.json", "no object of named numbers", id="a list"),
        pytest.param("""echo '{"a": "1"}' > $D/reward.json""", "a: expected a number", id="text"),
        pytest.param(
            """echo '{"a": 1, "b": 1}' > $D/reward.json""", "set verify.py --key", id="which one"
        ),
    ],
)
def test_tests_without_a_usable_reward_fail_the_sample(
    script: str, message: str, verify: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = verify(f"D=$LOGS_DIR/verifier\n{script}\n")
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert "hello-file: the tests (exit status" in done.stderr


def test_tests_and_logs_may_be_elsewhere(
    verify: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    tests, logs = tmp_path / "elsewhere/tests", tmp_path / "elsewhere/logs"
    script = f"[ $0 = {tests}/test.sh ] && echo 1 > {logs}/verifier/reward.txt"
    verify(script, "--tests", str(tests), "--logs", str(logs))
    assert left(tmp_path)["reward"] == FULL
    assert (logs / "verifier/test-stdout.txt").exists()


def test_in_an_image_the_tests_run_in_the_directory_of_the_task(
    verify: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "hello.txt").write_text("of the image")
    script = "grep image hello.txt && echo 1 > $LOGS_DIR/verifier/reward.txt"
    places = ("--tests", str(tmp_path / "tests"), "--logs", str(tmp_path / "logs"))
    done = verify(script, "--in-image", *places, workdir=str(app))
    assert done.returncode == 0, done.stderr
    assert left(tmp_path)["reward"] == FULL
    assert not (tmp_path / "work").exists(), "the container is the fresh copy"


@pytest.mark.parametrize("kind", ["no archive", "above", "through a link", "a pipe", "removed"])
def test_changes_that_leave_the_directory_score_zero(
    kind: str, verify: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    artifacts, kept = tmp_path / "artifacts", tmp_path / "kept"
    artifacts.mkdir()
    kept.write_text("kept")
    (artifacts / "removed.json").write_text(json.dumps(["../kept"] if kind == "removed" else []))
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, ".."
    pipe = tarfile.TarInfo("pipe")
    pipe.type = tarfile.FIFOTYPE
    members = {
        "above": [tarfile.TarInfo("../kept")],
        "through a link": [link, tarfile.TarInfo("link/kept")],
        "a pipe": [pipe],
    }
    with tarfile.open(artifacts / "changes.tar.gz", "w:gz") as archive:
        for member in members.get(kind, []):
            archive.addfile(member)
    if kind == "no archive":
        (artifacts / "changes.tar.gz").write_text("x")
    assert verify("echo 1 > $LOGS_DIR/verifier/reward.txt").returncode == 0
    assert left(tmp_path) == {"reward": {"score": 0.0}, "metadata": {"changes_applied": False}}
    assert kept.read_text() == "kept"


@pytest.fixture
def common() -> dict[str, Any]:
    """What the example's programs have in common."""
    return runpy.run_path(str(HARBOR / "common.py"))


def test_changes_of_all_kinds_are_repeated_in_a_fresh_copy(
    common: dict[str, Any], tmp_path: Path
) -> None:
    fresh, work, artifacts = (tmp_path / name for name in ("fresh", "work", "artifacts"))
    artifacts.mkdir()
    for name in ("kept", "edited", "mode", "gone/a/b", "file", "folder/x", "linked/x", "hidden"):
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).write_text(name)
    (fresh / "link").symlink_to("linked")
    shutil.copytree(fresh, work, symlinks=True)
    before = common["state_of"](work)
    (work / "edited").write_text("EDITED")
    (work / "mode").chmod(0o755)
    shutil.rmtree(work / "gone")
    (work / "file").unlink()
    (work / "file/inside").mkdir(parents=True)
    shutil.rmtree(work / "folder")
    (work / "folder").write_bytes(b"\xff")
    shutil.rmtree(work / "linked")
    (work / "linked").symlink_to("/usr/bin/env")
    (work / "link").unlink()
    (work / "link").mkdir()
    (work / "link/x").write_text("no link any more")
    os.link(work / "edited", work / "second name")
    os.mkfifo(work / "pipe")
    common["leave_changes"](work, before, artifacts)
    (work / "pipe").unlink()
    assert common["apply_changes"](artifacts, fresh)
    assert list(tree(fresh)) == list(tree(work))
    with tarfile.open(artifacts / "changes.tar.gz") as archive:
        assert not {"kept", "hidden"} & set(archive.getnames())


def tree(directory: Path) -> Iterator[tuple[str, int, object]]:
    """Yield path, mode and content of all that is in a directory."""
    for path in sorted(directory.rglob("*")):
        link = os.readlink(path) if path.is_symlink() else None
        content = link or (path.read_bytes() if path.is_file() else "a directory")
        yield str(path.relative_to(directory)), path.lstat().st_mode, content
