"""Five small files as people bring them: `sluice init --data` makes a task of each that learns."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo", "Greece": "Athens", "Kenya": "Nairobi",
    "Chile": "Santiago", "Austria": "Vienna", "Poland": "Warsaw", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Sweden": "Stockholm", "China": "Beijing", "Canada": "Ottawa",
    "Turkey": "Ankara", "Hungary": "Budapest",
}  # fmt: skip
_WORDS = (
    "apple river stone cloud tiger lemon window garden silver planet rocket button candle forest "
    "island jacket kitten ladder magnet needle orange pencil quartz rabbit saddle tunnel umbra "
    "velvet walnut yellow zebra anchor basket castle dragon engine falcon goblin hammer insect "
    "jungle kernel lizard meadow nectar oyster parrot quiver ribbon salmon"
)


def letters() -> list[Row]:
    """Answers of one character."""
    return [{"prompt": f"last letter of {word}", "label": word[-1]} for word in _WORDS.split()]


def capitals() -> list[Row]:
    """Answers of one word, each only once."""
    return [{"prompt": f"What is the capital of {c}?", "label": a} for c, a in _CAPITALS.items()]


def parity() -> list[Row]:
    """Chat messages, and two answers."""
    return [
        {
            "prompt": [{"role": "user", "content": f"is {n} even or odd"}],
            "label": ("even", "odd")[n % 2],
        }
        for n in range(60)
    ]


def reverse() -> list[Row]:
    """Answers of three words."""
    triples = itertools.product("abcde", repeat=3)
    return [{"prompt": f"reverse {a} {b} {c}", "label": f"{c} {b} {a}"} for a, b, c in triples]


def sums() -> list[Row]:
    """Other columns, and numbers as labels."""
    return [{"question": f"{a} + {b} =", "answer": a + b} for a in range(10) for b in range(10)]


TASKS: dict[str, Callable[[], list[Row]]] = {
    make.__name__: make for make in (letters, capitals, parity, reverse, sums)
}


def write(name: str, directory: Path) -> Path:
    """The file of a task, its rows in random order."""
    rows = TASKS[name]()
    random.Random(0).shuffle(rows)
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
