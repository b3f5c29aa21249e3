"""A task as `sluice init` writes it, and the commands on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.api import RLJob
from sluice_cli.init.command import TaskOptions, write_task
from sluice_cli.main import app
from sluice_client import run_dir
from sluice_client.run_dir import PreparedRun

Sluice = Callable[..., Result]


@pytest.fixture(scope="session")
def written_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("init") / "digits"
    write_task(TaskOptions(directory, model=None, data=None, gpus=0, steps=20))
    return directory


@pytest.fixture
def task(written_task: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may break."""
    return Path(shutil.copytree(written_task, tmp_path / "digits"))


@pytest.fixture
def sluice() -> Sluice:
    """Call a command: `sluice("validate", path)`."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def prepare(directory: Path, job: RLJob, *, fresh: bool) -> PreparedRun:
    """Lock and prepare a directory as `sluice run` does."""
    with run_dir.locked(directory):
        return run_dir.prepare(directory, job, fresh=fresh)
