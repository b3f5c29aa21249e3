"""An agent that repairs a repository with shell commands, and leaves a patch.

Each answer of the model may have one block of bash; its output is the next message. An answer
without a block ends the episode. The patch is what has changed in the repository.

It runs in a container of the row's image (`--repository /testbed`), or on a laptop in a copy of
examples/swe/repositories. Commands run as the agent's user: on a laptop give it models that you
would let use your shell, or `sluice run --containers`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from openai import BadRequestError, OpenAI

SYSTEM = (
    "Answer with one block of bash (```bash ... ```) to run commands in the repository. "
    "When the bug is repaired, answer without a block."
)
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
SHOWN, SECONDS = 4000, 30.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repository", type=Path, help="the repository of the image")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    row = json.loads(Path(os.environ["SLUICE_EPISODE"], "row.json").read_text())
    repository = options.repository or copied(row["metadata"]["instance_id"])
    if not (repository / ".git").exists():
        git(repository, "init", "--quiet")
        git(repository, "add", "--all")
        git(repository, "commit", "--quiet", "--message", "start")
    solve(row["prompt"], repository, options.turns)
    git(repository, "add", "--all")  # also new files
    patch = git(repository, "diff", "--cached", "--binary", "HEAD")
    Path(os.environ["SLUICE_ARTIFACTS"], "patch.diff").write_text(patch)


def copied(name: str) -> Path:
    work = Path(os.environ["SLUICE_EPISODE"], "work")
    shutil.copytree(Path(__file__).parent / "repositories" / name, work)
    return work


def solve(issue: str, repository: Path, turns: int) -> None:
    client, model = OpenAI(), os.environ["SLUICE_MODEL"]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": issue},
    ]
    for _ in range(turns):
        try:
            answer = client.chat.completions.create(model=model, messages=messages)
        except BadRequestError:  # the history is full
            return
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        block = BLOCK.search(text)
        if block is None:
            return
        messages.append({"role": "user", "content": run(block[1], repository)})


def run(commands: str, repository: Path) -> str:
    """Run commands, and return the end of their output."""
    hidden = {name: text for name, text in os.environ.items() if not name.startswith("OPENAI_")}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", commands],
            cwd=repository,
            env=hidden,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"the commands took more than {SECONDS:g} s"
    output = done.stdout.decode(errors="replace")[-SHOWN:]
    return f"{output}\nexit status {done.returncode}"


def git(repository: Path, *words: str) -> str:
    person = ("-c", "user.name=agent", "-c", "user.email=agent@localhost")
    command = ["git", *person, *words]
    return subprocess.run(
        command, cwd=repository, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()
