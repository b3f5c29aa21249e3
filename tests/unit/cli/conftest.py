"""Tasks and manifests for the commands, and the commands themselves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.api import RLJob
from sluice_cli.init.command import TaskOptions, write_task
from sluice_cli.init.tiny_model import write_model
from sluice_cli.main import app
from sluice_client import run_dir
from sluice_client.run_dir import PreparedRun

Sluice = Callable[..., Result]
JOB = """\
apiVersion: sluice.dev/v1alpha1
kind: RLJob
metadata: {name: tiny}
spec:
  model: {path: model, init: random}
  data: {prompts: [{path: "rows.jsonl@[0:2]"}]}
  reward: {function: "judge.py:score"}
  trainer: {steps: 3, gpusPerNode: 0}
  rollout: {gpusPerReplica: 0}
"""


@pytest.fixture(scope="session")
def written_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a task as `sluice init` writes it. Tests must not change it."""
    directory = tmp_path_factory.mktemp("init") / "digits"
    write_task(TaskOptions(directory, model=None, data=None, gpus=0, steps=20))
    return directory


@pytest.fixture
def task(written_task: Path, tmp_path: Path) -> Path:
    """Directory of a task that a test may change."""
    return Path(shutil.copytree(written_task, tmp_path / "digits"))


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """Manifest `JOB` in a directory with the files that it names."""
    write_model(tmp_path / "model", (), unit="bytes", context=2048)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "judge.py").write_text("def score(sample): return 1\n")
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def sluice() -> Sluice:
    """Call a command: `sluice("validate", path)`."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every cluster, and make an empty directory the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def prepare(directory: Path, job: RLJob, *, fresh: bool) -> PreparedRun:
    """Lock and prepare a directory as `sluice run` does."""
    with run_dir.locked(directory):
        return run_dir.prepare(directory, job, fresh=fresh)
