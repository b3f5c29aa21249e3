"""Agents that look at screenshots, as generate functions: OpenAI's client, and a tool."""

from __future__ import annotations

import asyncio
from typing import Any

from sluice.images.image import data_url
from sluice_rollout.episode import Episode
from sluice_rollout.tools import ToolCall, ToolLoop
from tests.vision_models import picture

STEPS = 3
SIZES = ((96, 64), (40, 40), (130, 70))
# Short answers: the model is random, and an answer with a placeholder ends the episode.
SHORT, LONG = 4, 160
# Set when an agent asks for a long answer, after two screenshots.
asks_long = asyncio.Event()


def screenshot(episode: Episode, step: int) -> dict[str, Any]:
    """Return a screenshot in OpenAI's form; each sample has others."""
    seed = 1 + step + 10 * episode.sample.index + 100 * episode.prompt.row
    image = picture(*SIZES[step % len(SIZES)], seed=seed)
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


async def play(episode: Episode) -> None:
    """Play some turns, then the last one again, as if its screenshot had been another."""
    await _play(episode, [SHORT] * (STEPS + 2))


async def play_slowly(episode: Episode) -> None:
    """Play as `play` does, with one long answer."""
    await _play(episode, [SHORT] * (STEPS - 1) + [LONG] + [SHORT] * 2)


async def _play(episode: Episode, max_tokens: list[int]) -> None:
    history: list[Any] = [*episode.prompt.prompt]
    limits = iter(max_tokens)
    async with episode.gateway.openai() as client:

        async def ask() -> Any:
            limit = next(limits)
            if limit == LONG:
                asks_long.set()
            answer = await client.chat.completions.create(
                model="any", messages=history, max_tokens=limit
            )
            return {"role": "assistant", "content": answer.choices[0].message.content}

        for step in range(STEPS):
            answer = await ask()
            parts = [{"type": "text", "text": f"step {step}:"}, screenshot(episode, step)]
            result = {"role": "tool", "tool_call_id": f"call-{step}", "content": parts}
            history += [answer, result]
        await ask()
        history[-1] = {**history[-1], "content": [screenshot(episode, STEPS)]}
        await ask()


async def look(episode: Episode) -> None:
    """Play some turns of a loop whose tool returns a screenshot, whatever the model says."""
    screenshots = iter([screenshot(episode, step) for step in range(STEPS)])

    def camera() -> list[Any]:
        return ["screen:", next(screenshots)]

    loop = ToolLoop([camera], parse=lambda _: [ToolCall("camera", {})], max_turns=STEPS + 1)
    await loop(episode)
