"""Translate between the frozen lake and a model of thirty words.

The model reads the number of its square and says one move.
"""

from __future__ import annotations

from typing import Any

MOVES = ["left", "down", "right", "up"]
"""The lake's actions 0 to 3."""


class Words:
    """Translator of one episode. env: the lake."""

    def __init__(self, env: Any) -> None:
        pass

    def observation(self, observation: int, info: dict[str, Any]) -> str:
        return str(observation)

    def action(self, answer: str) -> int:
        """Return the move. The text of a ValueError is shown to the model."""
        if answer.strip() not in MOVES:
            raise ValueError("which?")
        return MOVES.index(answer.strip())
