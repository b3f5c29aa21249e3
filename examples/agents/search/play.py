"""Joins the agent to a job, and to a search in the corpus.

question        the model's query    the best passage               the model
zorv depth      depth                > the depth of zorv is 7.      7.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice_rollout.episode import Episode
from sluice_rollout.toolbox import Search

sys.path.insert(0, str(Path(__file__).parent))
import agent  # type: ignore[import-not-found]

SEARCH = Search(Path(__file__).parent / "corpus.jsonl", top_k=1)


async def play(episode: Episode) -> None:
    """The agent, as it is."""
    async with episode.gateway.openai() as client:
        said, passage = await agent.solve(
            client, str(episode.prompt.prompt), SEARCH.session(), SEARCH.definition
        )
    episode.metadata.update(said=said, passage=passage)
