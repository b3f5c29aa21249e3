"""Writes four small tasks in Harbor's form into the directory `tasks`.

Their scripts find the tests and the logs in TESTS_DIR and LOGS_DIR, so that they also run as
processes; in a container these are /tests and /logs, as in every task of Harbor.

    python examples/harbor/make_data.py [DIRECTORY]
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONFIGURATION = """\
schema_version = "1.4"

[task]
name = "sluice/{name}"

[environment]
docker_image = "ghcr.io/me/tasks/{name}:1"
workdir = "/app"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0
"""
DOCKERFILE = """\
FROM python:3.12-slim
COPY app/ /app/
WORKDIR /app
"""
# The end of a script whose last command says whether the task is done.
ONE_OR_NONE = """\
if [ $? -eq 0 ]; then reward=1; else reward=0; fi
echo $reward > "${LOGS_DIR:-/logs}/verifier/reward.txt"
"""


@dataclass(frozen=True)
class Task:
    """A task: `files` are below /app, and `tests` beside test.sh."""

    name: str
    instruction: str
    script: str
    solution: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    tests: Mapping[str, bytes] = field(default_factory=dict)


TASKS = [
    Task(
        "hello-file",
        "Write a file hello.txt with the line: Hello, world!\n",
        f"""\
#!/bin/sh
[ "$(cat hello.txt)" = "Hello, world!" ]
{ONE_OR_NONE}""",
        "echo 'Hello, world!' > hello.txt\n",
    ),
    Task(
        "fix-median",
        "median.py gives a wrong result for lists of an even length. Repair it.\n",
        f"""\
#!/bin/sh
PYTHONDONTWRITEBYTECODE=1 python "${{TESTS_DIR:-/tests}}/test_outputs.py"
{ONE_OR_NONE}""",
        "sed -i 's|return .*|return (values[half] + values[~half]) / 2|' median.py\n",
        {
            "median.py": b"""\
def median(numbers):
    values = sorted(numbers)
    half = len(values) // 2
    return values[half]
"""
        },
        {
            "test_outputs.py": b"""\
import os
import sys
import unittest

sys.path.insert(0, os.getcwd())

from median import median


class Tests(unittest.TestCase):
    def test_odd(self):
        self.assertEqual(median([3, 1, 2]), 2)

    def test_even(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)


unittest.main()
"""
        },
    ),
    Task(
        "count-words",
        "Count the words of text.txt. Write an object with the number of each word, and with the\n"
        'number of all words as "total", to counts.json.\n',
        """\
#!/bin/sh
exec python "${TESTS_DIR:-/tests}/judge.py" "${LOGS_DIR:-/logs}/verifier/reward.json"
""",
        'python3 -c "\n'
        "import collections, json\n"
        "words = open('text.txt').read().split()\n"
        "json.dump(collections.Counter(words) | {'total': len(words)}, open('counts.json', 'w'))\n"
        '"\n',
        {"text.txt": b"the cat and the dog and the bird\n"},
        {
            "judge.py": b"""\
import json
import sys

expected = {"the": 3, "cat": 1, "and": 2, "dog": 1, "bird": 1}
try:
    found = json.load(open("counts.json"))
    counts = sum(found.get(word) == number for word, number in expected.items()) / len(expected)
    total = float(found.get("total") == 8)
except (OSError, ValueError, AttributeError):
    counts = total = 0.0
rewards = {"reward": (counts + total) / 2, "counts": counts, "total": total}
json.dump(rewards, open(sys.argv[1], "w"))
"""
        },
    ),
    Task(
        "join-pieces",
        "Join the files of the directory pieces, in order of their names, to whole.bin. Remove\n"
        "the directory.\n",
        f"""\
#!/bin/sh
[ ! -e pieces ] && cmp whole.bin "${{TESTS_DIR:-/tests}}/expected.bin"
{ONE_OR_NONE}""",
        "cat pieces/* > whole.bin\nrm -r pieces\n",
        {"pieces/1": b"\x89\xff\x00\x01", "pieces/2": b"\xfe\x00end"},
        {"expected.bin": b"\x89\xff\x00\x01\xfe\x00end"},
    ),
]


def main(directory: Path) -> None:
    for task in TASKS:
        folder = directory / "tasks" / task.name
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, "task.toml", CONFIGURATION.format(name=task.name).encode())
        write(folder, "instruction.md", task.instruction.encode())
        write(folder, "environment/Dockerfile", DOCKERFILE.encode())
        (folder / "environment/app").mkdir()
        for name, content in task.files.items():
            write(folder, f"environment/app/{name}", content)
        write(folder, "tests/test.sh", task.script.encode(), 0o755)
        for name, content in task.tests.items():
            write(folder, f"tests/{name}", content)
        write(folder, "solution/solve.sh", b"#!/bin/sh\n" + task.solution.encode(), 0o755)


def write(folder: Path, name: str, content: bytes, mode: int = 0o644) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    file.chmod(mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
