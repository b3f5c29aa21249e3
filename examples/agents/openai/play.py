"""Joins the agent to a job: its episode's address and key go in, its answer comes out.

question          the model        its tool     the model
7 * 8 + 5 =       calculate        1 >          1 <eos>
shelf q =         lookup           7 >          7 <eos>
"""

from __future__ import annotations

import sys
from pathlib import Path

from openai import AsyncOpenAI

from sluice.rewards import RewardInput
from sluice_rollout.episode import Episode

sys.path.insert(0, str(Path(__file__).parent))
import agent  # type: ignore[import-not-found]

CLIENT = AsyncOpenAI(api_key="of an episode")
"""Its connections serve all episodes: a client of one's own for each costs 50 ms."""


async def play(episode: Episode) -> None:
    """The agent, as it is."""
    gateway = episode.gateway
    client = CLIENT.with_options(base_url=gateway.base_url, api_key=gateway.api_key)
    episode.metadata["said"] = await agent.solve(client, str(episode.prompt.prompt))


def right(sample: RewardInput) -> float:
    """A third for one call of the right tool, a third for the right digit after it, a third for the
    end after that; nothing for a guess. Its order of finding things out is that of examples/tools.
    """
    said = str(sample.metadata.get("said", "")).split()
    tool = "lookup" if str(sample.prompt).startswith("shelf") else "calculate"
    if sample.metadata.get("tool_calls") != 1 or f'"{tool}"' not in sample.response:
        return 0.0
    if said[:1] != [str(sample.label)]:
        return 1 / 3
    return 1.0 if len(said) == 1 and not sample.truncated else 2 / 3


def exact(sample: RewardInput) -> float:
    """1 for the right answer and its end, whichever way it was found."""
    return float(sample.metadata.get("said") == sample.label and not sample.truncated)
