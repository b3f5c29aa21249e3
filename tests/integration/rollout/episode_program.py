"""A program of the `openai` client, as in an image that a user has built.

It knows two files of sluice only, row.json and result.json.

    python episode_program.py [stream | hang | silent | raise | flood]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from openai import AsyncOpenAI

from tests.integration.rollout.talkative import three_turns


async def main() -> None:
    directory = Path(os.environ["SLUICE_EPISODE"])
    row = json.loads((directory / "row.json").read_text())
    async with AsyncOpenAI() as client:
        messages = await three_turns(client, stream="stream" in sys.argv)
    if "raise" in sys.argv:
        raise RuntimeError("no such tool")
    if "hang" in sys.argv:
        await asyncio.sleep(3600)
    if "silent" not in sys.argv:
        words = "x" * 2**23 if "flood" in sys.argv else len(messages)
        said = {"reward": float(row["label"]), "metadata": {"messages": words}}
        (directory / "result.json").write_text(json.dumps(said))


asyncio.run(main())
