from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.run.laptop import QUICKSTART


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the quickstart with its data made."""
    directory = tmp_path_factory.mktemp("example") / "quickstart"
    shutil.copytree(QUICKSTART, directory, ignore=shutil.ignore_patterns("*.jsonl", "model", "__pycache__"))
    subprocess.run([sys.executable, str(directory / "make_data.py"), str(directory)], check=True, timeout=60)
    return directory


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are kept: SLUICE_LEARNING_DIR, which the figure is drawn from, or nowhere."""
    directory = Path(os.environ.get("SLUICE_LEARNING_DIR") or tmp_path_factory.mktemp("learning")).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    return directory
