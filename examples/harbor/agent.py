"""An agent that works on a Harbor task with shell commands.

Each answer of the model may have one block of bash; its output is the next message. An answer
without a block ends the episode, and so does the task's agent.timeout_sec. What has changed in the
working directory is left for the verifier.

It runs in a container of the task's image (`--in-image`), or on a laptop in a copy of the folder
`environment/app` of the task. Commands run as the agent's user: on a laptop give it models that
you would let use your shell, or `sluice run --containers`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import (  # type: ignore[import-not-found]
    leave_changes,
    read_row,
    resolved,
    state_of,
    working_directory,
)
from openai import BadRequestError, OpenAI

SYSTEM = (
    "Answer with one block of bash (```bash ... ```) to run commands in the working directory. "
    "When the task is done, answer without a block."
)
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
SHOWN, SECONDS = 4000, 60.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-image", action="store_true", help="run in the image of the task")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    row = read_row()
    directory = working_directory(row, options.in_image)
    before = state_of(directory)
    variables = resolved(row["metadata"].get("env", {}))
    seconds = row["metadata"].get("agent_timeout_sec", float("inf"))
    solve(row["prompt"], directory, variables, options.turns, time.monotonic() + seconds)
    leave_changes(directory, before, Path(os.environ["SLUICE_ARTIFACTS"]))


def solve(
    task: str, directory: Path, variables: Mapping[str, str], turns: int, deadline: float
) -> None:
    client, model = OpenAI(), os.environ["SLUICE_MODEL"]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task},
    ]
    for _ in range(turns):
        try:
            answer = client.chat.completions.create(model=model, messages=messages)
        except BadRequestError:  # the history is full
            return
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        block, left = BLOCK.search(text), deadline - time.monotonic()
        if block is None or left <= 0:
            return
        output = run(block[1], directory, variables, min(SECONDS, left))
        messages.append({"role": "user", "content": output})


def run(commands: str, directory: Path, variables: Mapping[str, str], seconds: float) -> str:
    """Run commands, and return the end of their output."""
    hidden = {name: text for name, text in os.environ.items() if not name.startswith("OPENAI_")}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", commands],
            cwd=directory,
            env={**hidden, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"the commands took more than {seconds:g} s"
    output = done.stdout.decode(errors="replace")[-SHOWN:]
    return f"{output}\nexit status {done.returncode}"


if __name__ == "__main__":
    main()
