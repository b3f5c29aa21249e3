"""A user's rows as a small task that a tiny model can learn: its vocabulary, its sizes, and a
held-out part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.api import ManifestError
from sluice.api.groups.data import PromptSource
from sluice.data.files import Located, read_source
from sluice.data.messages import text_of
from sluice.data.rows import PromptRow, RowError, parse_row
from sluice.data.transform import chosen, digest
from sluice.data.writers import Writer
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.init.tiny_model import Unit

# Prompts are held out if there are at least so many; then a tenth of them, and no more than 64.
FEWEST, SHARE, MOST = 10, 0.1, 64
LONGEST_ANSWER = 512


@dataclass(slots=True)
class Rows:
    """Facts about the rows of a file, as a small task needs them.

    prompts: digests, in order. chats: True if a prompt is messages. answers: how many there are.
    total, longest_answer, longest_prompt: sizes by the unit that a tiny model may read.
    """

    prompts: dict[bytes, None] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)
    characters: set[str] = field(default_factory=set)
    chats: bool = False
    answers: int = 0
    total: dict[Unit, int] = field(default_factory=lambda: dict.fromkeys(SPLIT, 0))
    longest_answer: dict[Unit, int] = field(default_factory=lambda: dict.fromkeys(SPLIT, 0))
    longest_prompt: dict[Unit, int] = field(default_factory=lambda: dict.fromkeys(SPLIT, 0))

    def add(self, row: PromptRow) -> None:
        self.prompts[digest(row.prompt)] = None
        self.chats = self.chats or not isinstance(row.prompt, str)
        prompt, answers = prompt_text(row), answers_of(row)
        for text in (prompt, *answers):
            self.words.update(text.split())
            self.characters.update(text)
        self.answers += len(answers)
        for unit, split in SPLIT.items():
            self.longest_prompt[unit] = max(self.longest_prompt[unit], len(split(prompt)))
            for answer in answers:
                size = len(split(answer))
                self.total[unit] += size
                self.longest_answer[unit] = max(self.longest_answer[unit], size)

    def vocabulary(self, unit: Unit) -> list[str]:
        """The tokens that a tiny model needs for these rows; none for bytes, which are known."""
        return sorted({"words": self.words, "characters": self.characters}.get(unit, set()))

    @property
    def unit(self) -> Unit:
        """The unit in which a model that knows nothing yet says a right answer most often.

        Of V equally likely tokens, an answer of n tokens and its end come with probability
        V**-(n + 1). Words win where answers are whole words of a small vocabulary, characters where
        they are short.
        """
        if not self.answers:
            return "bytes"
        sizes: dict[Unit, int] = {
            "words": len(self.words),
            "characters": len(self.characters),
            "bytes": 256,
        }

        def improbability(unit: Unit) -> float:
            return (self.total[unit] / self.answers + 1) * math.log(sizes[unit] + 1)

        return min(sizes, key=improbability)

    @property
    def held_out(self) -> int:
        """Prompts to hold out."""
        count = len(self.prompts)
        return min(MOST, round(SHARE * count)) if count >= FEWEST else 0


SPLIT: dict[Unit, Callable[[str], Any]] = {
    "words": str.split,
    "characters": str,
    "bytes": str.encode,
}


def prompt_text(row: PromptRow) -> str:
    """The prompt as one text; messages one behind the other."""
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(text_of(message.get("content")) for message in row.prompt)


def answers_of(row: PromptRow) -> list[str]:
    """The label as texts: several if it is a list."""
    labels = row.label if isinstance(row.label, list) else [row.label]
    return [str(label) for label in labels if label is not None and str(label)]


def read(data: Path, keys: dict[str, str]) -> Rows:
    """Look at every row of the user's file. keys: its columns, as the manifest names them.

    Raises ManifestError for the first row that cannot be used.
    """
    rows = Rows()
    for _, row in _parsed(data, keys):
        rows.add(row)
    return rows


def split(data: Path, keys: dict[str, str], rows: Rows, train: Path, test: Path) -> None:
    """Write the rows into a part for training and, if there are enough, a held-out part. No prompt
    is in both.
    """
    picks = zip(rows.prompts, chosen(len(rows.prompts), rows.held_out, seed=0), strict=True)
    held = {prompt for prompt, picked in picks if picked}
    with Writer(train) as kept:
        if not held:
            for located, _ in _parsed(data, keys):
                kept.write(located.row)
            return
        with Writer(test) as out:
            for located, row in _parsed(data, keys):
                (out if digest(row.prompt) in held else kept).write(located.row)


def _parsed(data: Path, keys: dict[str, str]) -> Iterator[tuple[Located, PromptRow]]:
    source = PromptSource.model_validate({"path": str(data), **keys})
    try:
        for located in read_source(str(data)):
            try:
                yield located, parse_row(located.row, source)
            except RowError as error:
                raise ManifestError(f"--data {located.where}: {error}") from error
    except ConfigurationError as error:
        raise ManifestError(f"--data {error}") from error
