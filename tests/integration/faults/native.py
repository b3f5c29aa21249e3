"""Libraries for LD_PRELOAD, compiled from preload/*.c."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.tools import missing

SOURCES = Path(__file__).parent / "preload"


@cache
def library(name: str) -> Path:
    """The compiled preload/`name`.c; skips if there is no C compiler (`missing`)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        missing("needs a C compiler (gcc) for LD_PRELOAD")
    target = Path(mkdtemp(prefix="sluice-preload-")) / f"{name}.so"
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", target, SOURCES / f"{name}.c"], check=True)
    return target


def recorded(journal: Path, directory: Path, code: str, *arguments: str) -> str:
    """Run a program whose work under `directory` goes into a journal (disk.py); what it printed."""
    environment = os.environ | {"LD_PRELOAD": str(library("power"))}
    environment |= {"POWER_DIRECTORY": str(directory), "POWER_JOURNAL": str(journal)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
