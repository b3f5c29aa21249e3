"""Writes the repositories of bugs.py, and rows with the fields of SWE-bench.

As for SWE-bench, the lists of tests are what the tests say: they run without and with the patch.

    python examples/swe/make_data.py [DIRECTORY]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bugs import TASKS, Task  # type: ignore[import-not-found]

COMMAND = "python -m unittest -v"
TASK = (
    "You are in a repository with a bug. Read and change its files with shell commands.\n\n{issue}"
)


def main(directory: Path) -> None:
    rows = []
    for task in TASKS:
        write(directory / "repositories" / task.name, task.repository)
        rows.append(row(task))
    lines = "".join(f"{json.dumps(found)}\n" for found in rows)
    (directory / "train.jsonl").write_text(lines)


def row(task: Task) -> dict[str, Any]:
    before, after = passed(task.repository | task.tests), passed(task.files | task.tests)
    metadata = {
        "instance_id": task.name,
        "FAIL_TO_PASS": sorted(after - before),
        "PASS_TO_PASS": sorted(after & before),
        "test_cmd": COMMAND,
        "log_parser": "unittest",
        "test_files": task.tests,
    }
    return {"prompt": TASK.format(issue=task.issue), "metadata": metadata}


def passed(files: Mapping[str, str]) -> set[str]:
    """Run the tests of a repository, and return the names of those that pass."""
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), files)
        words = [sys.executable, *COMMAND.split()[1:]]
        done = subprocess.run(words, cwd=directory, text=True, capture_output=True)
    return set(re.findall(r"^(\w+ \(.*\)) \.\.\. ok$", done.stderr, re.MULTILINE))


def write(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
