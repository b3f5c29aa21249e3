"""Joins the agent to an episode: the question comes in a variable, the answer goes into a file."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parent.with_name("openai")))
import agent  # type: ignore[import-not-found]


async def main() -> None:
    async with AsyncOpenAI() as client:  # finds address and key by itself
        said = await agent.solve(client, os.environ["SLUICE_PROMPT"])
    result = Path(os.environ["SLUICE_EPISODE"], "result.json")
    result.write_text(json.dumps({"metadata": {"said": said}}))


asyncio.run(main())
