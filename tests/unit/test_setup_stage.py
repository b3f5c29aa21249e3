"""A stage of the set-up shows one line; what its command prints is shown only if it fails."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.tools import ROOT


def stage(log: Path, script: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [ROOT / "tools/stage.sh", log, "1/2 torch", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_stage_that_succeeds_is_one_line_with_its_seconds(tmp_path: Path) -> None:
    done = stage(tmp_path / "setup.log", "echo noise; echo ERROR: noise >&2")
    assert done.returncode == 0
    assert re.fullmatch(r"  1/2 torch +\d+ s\n", done.stdout)
    assert done.stderr == ""
    assert (tmp_path / "setup.log").read_text() == "noise\nERROR: noise\n"


def test_a_stage_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "setup.log"
    done = stage(log, "echo no such package >&2; exit 3")
    assert done.returncode == 3
    assert done.stdout.endswith(f"failed; the end of {log}:\nno such package\n")
