"""Joins the agent to a job. A session has a function that lacks an import; which, its error tells.

question      the model's program              the error         the model's next program
task ( ) =    from math import gcd             > sqrt            from math import sqrt
              print(task())                                      print(task())
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sluice_rollout.episode import Episode
from sluice_rollout.toolbox import Python

sys.path.insert(0, str(Path(__file__).parent))
import agent  # type: ignore[import-not-found]

PYTHON = Python(sandboxes=2)


async def play(episode: Episode) -> None:
    """The agent, and a session that has the row's function."""
    run = PYTHON.session()
    await asyncio.to_thread(run, str(episode.prompt.metadata["code"]))
    question = str(episode.prompt.prompt)
    async with episode.gateway.openai() as client:
        episode.metadata["printed"] = await agent.solve(client, question, run)
