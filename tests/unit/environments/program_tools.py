"""Helpers of tests with programs: Python texts that play episodes at a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sluice_rollout.environments import orphan_reaper
from sluice_rollout.environments.program import Program
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.unit.buffer.buffer_tools import make_job
from tests.unit.gateway.gateway_tools import episode_runner, open_registry
from tests.unit.rollout.scripted_engine import Script

# Functions for programs: `ask` asks the model, `leave` writes the result.
HEAD = """
import json, os, pathlib, subprocess, sys, time, urllib.request

def ask(text, **more):
    body = {"model": "any", "messages": [{"role": "user", "content": text}], **more}
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(address, json.dumps(body).encode(), key)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def leave(**result):
    pathlib.Path(os.environ["SLUICE_EPISODE"], "result.json").write_text(json.dumps(result))
"""
FOREVER = "while True: time.sleep(1)"


def python_command(text: str) -> list[str]:
    """Return the command that runs a Python text, which may call `ask` and `leave`."""
    return [sys.executable, "-I", "-S", "-c", HEAD + text]


@contextlib.asynccontextmanager
async def program_runner(
    program: Program, engine: Script, directory: Path, seconds: float = 20.0
) -> AsyncIterator[EpisodeRunner]:
    """Make a runner that plays episodes with a program."""
    async with open_registry(directory) as registry:
        runner = episode_runner(registry, program, engine)
        runner.seconds, runner.name = seconds, "agent"
        yield runner


def left_behind(program: Program) -> list[Any]:
    """Return the directories and processes of a program's episodes."""
    return [*os.listdir(program._directory), *orphan_reaper.marked_processes(program._directory)]


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def environment(directory: Path, **changes: Any) -> Any:
    """Make the specification of a job with `rollout.environment`."""
    settings = {f"rollout__environment__{name}": value for name, value in changes.items()}
    return make_job(directory, **settings).spec
