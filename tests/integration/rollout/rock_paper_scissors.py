"""A game of two seats, both the model that is trained: what it says counts by its last word."""

from __future__ import annotations

from typing import Any

from sluice_rollout.episode import Episode
from tests.integration.rollout.talkative import client_of

ROUNDS = 2
TOKENS = 4


async def play(episode: Episode) -> None:
    """Two rounds. Each player is told what the other has chosen, and sees its own words alone."""
    histories: dict[str, list[Any]] = {"white": [], "black": []}
    score = 0
    async with client_of(episode) as client:
        prompts = {"white": "w0002", "black": "w0002"}
        for _ in range(ROUNDS):
            moves = {
                seat: await move(client, seat, h, prompts[seat]) for seat, h in histories.items()
            }
            won = (-1, 0, 1)[(moves["white"] - moves["black"] + 1) % 3]
            episode.turn_reward(0.5 * won, seat="white")
            episode.turn_reward(-0.5 * won, seat="black")
            prompts = {"white": f"w{3 * moves['black'] + 2:04d}", "black": "w0005"}
            score += won
    episode.metadata["score"] = score
    episode.reward(float(score), seat="white")
    episode.reward(float(-score), seat="black")


async def move(client: Any, seat: str, history: list[Any], prompt: str) -> int:
    """Ask a player for its move: 0, 1 or 2."""
    history.append({"role": "user", "content": prompt})
    answer = await client.chat.completions.create(
        model=seat, messages=history, max_tokens=TOKENS, tool_choice="none"
    )
    message = answer.choices[0].message
    history.append({"role": "assistant", "content": message.content})
    return sum(map(ord, message.content)) % 3
