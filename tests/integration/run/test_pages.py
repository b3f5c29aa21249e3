"""Commands of the documentation's pages run in the folder of a trained task."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.run.laptop import Laptop, processes_of
from tests.integration.run.test_run import check_sound
from tests.pages import PAGES, blocks, name_of

pytestmark = pytest.mark.timeout(600)
SECONDS = 120.0
SLIME = (
    "python3 train.py --hf-checkpoint /m --prompt-data /d/rows.jsonl --num-rollout 9"
    " --rollout-batch-size 8 --n-samples-per-prompt 4 --rm-type math\n"
)
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=$HOME/train.parquet"
    " actor_rollout_ref.model.path=/m\n"
)
# Files that a reader of the pages has, in addition to the task.
FILES = {
    "capitals.jsonl": '{"prompt": "The capital of France?", "label": "Paris"}\n' * 8,
    "run-qwen3-4B.sh": SLIME,
    "run.sh": VERL,
    "my_trainer.yaml": "data: {max_prompt_length: 256}\n",
}


@dataclass(frozen=True, slots=True)
class Trained:
    """folder: of the task, with its runs. stopped_at: the step of the interruption."""

    folder: Path
    run: Laptop
    stopped_at: int


@pytest.fixture(scope="module")
def trained(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A run of a new task: interrupted, and made longer."""
    folder = Path(shutil.copytree(task, tmp_path_factory.mktemp("reader") / "task"))
    (folder / "runs").mkdir()
    settings = ("checkpoint.everySteps=5", "evaluation.everySteps=5", "rollout.batchSize=8")
    run = Laptop(folder, folder / "runs/digits", *settings, "trainer.steps=13")
    longer = Laptop(folder, run.directory, *settings, "trainer.steps=14", "checkpoint.keep=3")
    try:
        run.start()
        run.until_step(3)
        run.kill("run", signal.SIGINT)
        assert run.wait(60) == 130
        assert "the same command continues the run" in run.text()
        assert processes_of(run.directory) == []
        stopped_at = run.step()
        assert longer.run() == 0, longer.text()[-3000:]
        (folder / "runs/quickstart").symlink_to(run.directory)
        yield Trained(folder, longer, stopped_at)
    finally:
        run.stop()
        longer.stop()


def test_an_interrupted_run_of_a_new_task_goes_on(trained: Trained) -> None:
    run = trained.run
    check_sound(run, 14, groups=8)
    replayed = run.replayed()
    assert not replayed or min(replayed) > trained.stopped_at - 5
    assert all(len({r["train/loss"] for r in records}) == 1 for records in replayed.values())


COMMANDS = {
    name_of(page): [command for block in blocks(page) for command in block.unmarked()]
    for page in PAGES
}
RUN = {name: commands for name, commands in COMMANDS.items() if commands}
# A prefix: these are run once, whatever pages have them, since all that they read is the same.
SLOW = "sluice validate"


@pytest.fixture
def reader(trained: Trained, tmp_path: Path) -> Path:
    """A copy of the task's folder, with all that pages speak of. It is its user's home."""
    for entry in trained.folder.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/Qwen3-0.6B").symlink_to(trained.folder / "model")
    return tmp_path


@pytest.fixture(scope="module")
def validated() -> set[str]:
    """Slow commands that were run for an earlier page."""
    return set()


@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page_do_what_it_says(page: str, reader: Path, validated: set[str]) -> None:
    folder = reader
    for command in RUN[page]:
        if command in validated:
            continue
        if command.startswith(SLOW):
            validated.add(command)
        if command.startswith("cd "):
            folder /= command.removeprefix("cd ")
            (folder / "runs").symlink_to(reader / "runs")
            continue
        done = run(command.replace("NAME", "digits"), folder, reader)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def run(command: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KUBECONFIG": str(home / "no-cluster"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
