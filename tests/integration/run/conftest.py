from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sluice_cli.init.command import TaskOptions, write_task
from tests.integration.run.laptop import QUICKSTART, Laptop
from tests.integration.run.otlp import Receiver
from tests.integration.vllm_engine import PYTHON
from tests.tools import missing

FAST = (
    "failurePolicy.rolloutBackoffSeconds=1",
    "checkpoint.everySteps=5",
    "evaluation.everySteps=5",
)


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the quickstart with its data."""
    directory = tmp_path_factory.mktemp("example") / "quickstart"
    shutil.copytree(
        QUICKSTART, directory, ignore=shutil.ignore_patterns("*.jsonl", "model", "__pycache__")
    )
    subprocess.run(
        [sys.executable, str(directory / "make_data.py"), str(directory)], check=True, timeout=60
    )
    return directory


@pytest.fixture
def pretrained(example: Path, tmp_path: Path) -> Path:
    """Write the quickstart's model with weights, which an engine reads if it gets adapters."""
    directory = tmp_path / "model"
    shutil.copytree(example / "model", directory)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(directory)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task as `sluice init` writes it."""
    directory = tmp_path_factory.mktemp("init") / "digits"
    write_task(TaskOptions(directory, model=None, data=None, gpus=0, steps=20))
    return directory


@pytest.fixture(params=["sglang", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> str:
    """Value of `rollout.engine`: the test runs with each engine."""
    word: str = request.param
    if word == "vllm" and not PYTHON.exists():
        missing("needs vLLM: make vllm")
    return word


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Receives the traces of processes that the test starts."""
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


@pytest.fixture
def laptop(example: Path, tmp_path: Path) -> Iterator[Callable[..., Laptop]]:
    """Make runs of the quickstart; they are stopped at the end of the test."""
    laptops: list[Laptop] = []

    def make(*overrides: str, name: str = "run", example: Path = example) -> Laptop:
        laptops.append(Laptop(example, tmp_path / name, *FAST, *overrides))
        return laptops[-1]

    yield make
    for run in laptops:
        run.stop()
