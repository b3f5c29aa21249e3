"""`python -m tests.chaos`: FAULTS faults (200) from SLUICE_TEST_SEED (drawn and printed) over real
quickstart runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chaos.driver import inflict_all
from tests.chaos.faults import draw
from tests.integration.run.laptop import QUICKSTART
from tests.integration.run.test_kill import seed


def main() -> None:
    """The runs' directory is kept if a check fails; its path is printed first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run ends with us
    chosen, number = seed(), int(os.environ.get("FAULTS", "200"))
    directory = Path(tempfile.mkdtemp(prefix="sluice-chaos-"))
    print(f"SLUICE_TEST_SEED={chosen} FAULTS={number}, in {directory}", flush=True)
    example = directory / "quickstart"
    shutil.copytree(
        QUICKSTART, example, ignore=shutil.ignore_patterns("*.jsonl", "model", "__pycache__")
    )
    subprocess.run(
        [sys.executable, str(example / "make_data.py"), str(example)], check=True, timeout=60
    )
    inflict_all(draw(chosen, number), example, directory, seed=chosen)
    shutil.rmtree(directory)
    print(f"{number} faults survived: no prompt lost, none trained twice")


main()
