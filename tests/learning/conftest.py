from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.run.laptop import ROOT


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a copy of an example with its data made."""
    root = tmp_path_factory.mktemp("examples")

    def make(name: str) -> Path:
        directory = root / name
        if not directory.exists():
            ignored = shutil.ignore_patterns("*.jsonl", "model", "teacher", "__pycache__")
            source = ROOT / "examples" / name
            shutil.copytree(source, directory, ignore=ignored)
            subprocess.run(
                [sys.executable, str(source / "make_data.py"), str(directory)],
                check=True,
                timeout=300,
            )
        return directory

    return make


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the runs: SLUICE_LEARNING_DIR, which the figure is drawn from, or one that
    is not kept."""
    directory = Path(
        os.environ.get("SLUICE_LEARNING_DIR") or tmp_path_factory.mktemp("learning")
    ).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    return directory
