"""Tiny models on disk, created once for all tests of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.integration.trainer.tiny import TIMEOUT, save_model, save_reward_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread, so that sums have a fixed order: bit-exact comparisons need it."""
    torch.set_num_threads(1)


class Models(dict[str, Path]):
    """Checkpoints of the families by name, as transformers writes them, created on first use."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, family: str) -> Path:
        self[family] = save_model(family, self._root / family)
        return self[family]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def qwen3(models: dict[str, Path]) -> Path:
    return models["qwen3"]


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward-model"))


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Make this process a trainer of one rank."""
    from sluice.api import Parallelism
    from sluice_trainer.megatron import parallel

    parallel.initialize(Parallelism(), seed=1, timeout=timedelta(seconds=TIMEOUT))
    yield
    parallel.shutdown()
