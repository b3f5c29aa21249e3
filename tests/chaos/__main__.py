"""Apply FAULTS (200) random faults to real quickstart runs: `python -m tests.chaos`.

They are drawn from SLUICE_TEST_SEED, which is random by default and is printed.
"""

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
    """Run all faults. The runs' directory, which is printed first, is kept if a check fails."""
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
