"""Joins the agent to a job: its episode's address and key go in, its answer comes out.

question          the model        its tool     the model
7 * 8 + 5 =       calculate        > 1.         1.
shelf 0 =         lookup           > 7.         7.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice_rollout.episode import Episode

sys.path.insert(0, str(Path(__file__).parent))
import agent  # type: ignore[import-not-found]


async def play(episode: Episode) -> None:
    """The agent, as it is."""
    async with episode.gateway.openai() as client:
        episode.metadata["said"] = await agent.solve(client, str(episode.prompt.prompt))
