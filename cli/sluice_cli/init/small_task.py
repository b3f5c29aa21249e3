"""Turn a file of rows into a small task that a tiny model can learn.

The rows give the model's vocabulary and sizes, and are split into a training and a held-out file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.api import ManifestError
from sluice.api.groups.data import PromptSource
from sluice.data.answers import AnsweredRow
from sluice.data.files import LocatedRow, read_source
from sluice.data.messages import text_of
from sluice.data.preferences import PairRow
from sluice.data.rows import PromptRow, RowError, RowReader, parse_row
from sluice.data.transform import chosen, digest
from sluice.data.writers import Writer
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.init.tiny_model import Unit

# A file of at least MIN_PROMPTS prompts has a held-out part: HELD_OUT_FRACTION of the prompts, and
# at most MAX_HELD_OUT.
MIN_PROMPTS, HELD_OUT_FRACTION, MAX_HELD_OUT = 10, 0.1, 64
# Longest answer, in tokens, that a tiny model is made for.
MAX_ANSWER_TOKENS = 512


@dataclass(slots=True)
class RowStatistics:
    """Facts about the rows of a file that a small task depends on."""

    # Digests of the distinct prompts, in order.
    prompts: dict[bytes, None] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)
    characters: set[str] = field(default_factory=set)
    # True if any prompt is a list of messages.
    chats: bool = False
    # Number of answers.
    answers: int = 0
    # Length of all answers together, by the unit that a token may be; likewise the longest ones.
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
        """Return the words or characters of the rows; empty for bytes."""
        return sorted({"words": self.words, "characters": self.characters}.get(unit, set()))

    @property
    def unit(self) -> Unit:
        """The unit with which an untrained model gives right answers most often.

        With V equally likely tokens, an answer of n tokens and its end has probability
        V**-(n + 1). Words win if answers are whole words of a small vocabulary, characters if
        answers are short.
        """
        if not self.answers:
            return "bytes"
        sizes: dict[Unit, int] = {
            "words": len(self.words),
            "characters": len(self.characters),
            "bytes": 256,
        }

        def negative_log_probability(unit: Unit) -> float:
            return (self.total[unit] / self.answers + 1) * math.log(sizes[unit] + 1)

        return min(sizes, key=negative_log_probability)

    @property
    def held_out(self) -> int:
        """Number of prompts to hold out."""
        count = len(self.prompts)
        return min(MAX_HELD_OUT, round(HELD_OUT_FRACTION * count)) if count >= MIN_PROMPTS else 0


SPLIT: dict[Unit, Callable[[str], Any]] = {
    "words": str.split,
    "characters": str,
    "bytes": str.encode,
}


def prompt_text(row: PromptRow) -> str:
    """Return the prompt as one text; messages are joined by line ends."""
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(text_of(message.get("content")) for message in row.prompt)


def answers_of(row: PromptRow) -> list[str]:
    """Return the right answers: the label, or its elements if it is a list; both of a pair."""
    if isinstance(row, PairRow):
        return [_given(row.chosen), _given(row.rejected)]
    labels = row.label if isinstance(row.label, list) else [row.label]
    return [str(label) for label in labels if label is not None and str(label)]


def _given(answer: AnsweredRow) -> str:
    """Return the text of a given answer, of a conversation its last message."""
    if answer.answer is not None or isinstance(answer.prompt, str):
        return answer.answer or ""
    return text_of(answer.prompt[-1].get("content"))


def read(data: Path, keys: dict[str, str], parse: RowReader = parse_row) -> RowStatistics:
    """Read all rows of a file.

    Parameters
    ----------
    data
        The file.
    keys
        Names of its columns, by the field of `spec.data.prompts[]`.
    parse
        Reader of a row.

    Raises
    ------
    ManifestError
        If a row is unusable; it names the first one.

    """
    rows = RowStatistics()
    for _, row in _parsed(data, keys, parse):
        rows.add(row)
    return rows


def split(
    data: Path,
    keys: dict[str, str],
    rows: RowStatistics,
    train: Path,
    test: Path,
    parse: RowReader = parse_row,
) -> None:
    """Write a training file and, if there are enough prompts, a held-out file.

    Rows with the same prompt are in the same file.
    """
    # The choice is made among prompts, not rows, so that no prompt is in both files.
    picks = zip(rows.prompts, chosen(len(rows.prompts), rows.held_out, seed=0), strict=True)
    held = {prompt for prompt, picked in picks if picked}
    with Writer(train) as kept:
        if not held:
            for located, _ in _parsed(data, keys, parse):
                kept.write(located.row)
            return
        with Writer(test) as out:
            for located, row in _parsed(data, keys, parse):
                (out if digest(row.prompt) in held else kept).write(located.row)


def _parsed(
    data: Path, keys: dict[str, str], parse: RowReader
) -> Iterator[tuple[LocatedRow, PromptRow]]:
    source = PromptSource.model_validate({"path": str(data), **keys})
    try:
        for located in read_source(str(data)):
            try:
                yield located, parse(located.row, source)
            except RowError as error:
                raise ManifestError(f"--data {located.where}: {error}") from error
    except ConfigurationError as error:
        raise ManifestError(f"--data {error}") from error
