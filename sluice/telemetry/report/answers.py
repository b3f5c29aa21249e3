"""Answers of a run: how answers to one prompt change, and the newest samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.images import thumbnail
from sluice.images.image import is_image_part, referred
from sluice.telemetry import run_directory

_EVALUATED = re.compile(r"eval_(?P<dataset>.+)_(?P<version>\d+)\.jsonl")
_PROMPTS, _MOMENTS, _ROWS, _LONGEST = 4, 4, 12, 600


@dataclass(frozen=True, slots=True)
class Answer:
    version: int
    text: str
    reward: str


@dataclass(frozen=True, slots=True)
class AnswerHistory:
    """Answers to one prompt over the run, oldest weights first."""

    prompt: str
    label: str
    answers: Sequence[Answer]
    # Thumbnails of the prompt's images, as data URLs.
    images: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sample in a table: its cells, and thumbnails of its images as data URLs."""

    cells: Sequence[str]
    images: Sequence[str] = ()


def histories(directory: Path) -> list[AnswerHistory]:
    """Return prompts of the first evaluation data set, with answers at a few weight versions."""
    evaluations = _evaluations(directory)
    if len(evaluations) < 2:
        return []
    versions = _spread(sorted(evaluations))
    by_prompt: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for version in versions:
        seen = set[str]()
        for record in run_directory.records(evaluations[version]):
            prompt = str(record.get("prompt"))  # whole: other images make another prompt
            if prompt not in seen:  # the first of several answers is enough
                seen.add(prompt)
                by_prompt.setdefault(prompt, []).append((version, record))
    whole = [rows for rows in by_prompt.values() if len(rows) == len(versions)]
    return [_history(rows, directory) for rows in whole[:_PROMPTS]]


def newest(directory: Path) -> tuple[list[str], list[SampleRow]]:
    """Return columns and rows of the newest evaluation's samples, else of the last step's."""
    samples = directory / "samples"
    files = sorted(samples.glob("eval_*.jsonl"), key=_version) or sorted(samples.glob("*.jsonl"))
    records = list(run_directory.records(files[-1]))[:_ROWS] if files else []
    names = ("prompt", "response", "label", "reward")
    columns = [name for name in names if any(r.get(name) is not None for r in records)]
    return columns, [
        SampleRow([_text(record.get(name)) for name in columns], _images(directory, record))
        for record in records
    ]


def _images(directory: Path, record: Mapping[str, Any]) -> list[str]:
    prompt = record.get("prompt")
    digests = record.get("images") or (referred(prompt) if isinstance(prompt, list) else [])
    return thumbnail.data_urls(directory / "samples", digests[: thumbnail.PER_PROMPT])


def _evaluations(directory: Path) -> dict[int, Path]:
    """Return the files of the first data set by weight version."""
    matches = sorted(_named(directory / "samples"))
    return {version: path for dataset, version, path in matches if dataset == matches[0][0]}


def _named(samples: Path) -> Iterator[tuple[str, int, Path]]:
    for path in samples.glob("eval_*.jsonl"):
        if match := _EVALUATED.fullmatch(path.name):
            yield match["dataset"], int(match["version"]), path


def _version(path: Path) -> int:
    match = _EVALUATED.fullmatch(path.name)
    return int(match["version"]) if match else -1


def _spread(versions: Sequence[int]) -> list[int]:
    """Return the first, the last, and a few evenly spaced versions between them."""
    last = len(versions) - 1
    count = min(_MOMENTS, len(versions))
    return [versions[round(i * last / (count - 1))] for i in range(count)]


def _history(rows: Sequence[tuple[int, Mapping[str, Any]]], directory: Path) -> AnswerHistory:
    first = rows[0][1]
    answers = [
        Answer(version, _text(record.get("response")), _text(record.get("reward")))
        for version, record in rows
    ]
    images = _images(directory, first)
    return AnswerHistory(_text(first.get("prompt")), _text(first.get("label")), answers, images)


def _content(content: Any) -> Any:
    """Return a message's content with a word for each image."""
    if not isinstance(content, list):
        return content
    return "".join(
        "[image]" if is_image_part(part) else str(part.get("text", part)) for part in content
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):  # a conversation
        value = "\n".join(f"{turn.get('role')}: {_content(turn.get('content'))}" for turn in value)
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text)} characters)"
