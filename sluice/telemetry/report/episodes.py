"""Pages of a run's episodes: turns, tools, tokens, rewards, branches and images of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.images import thumbnail
from sluice.telemetry import run_directory

# Directory of the pages, next to report.html.
DIRECTORY = "episodes"
_FILES = 6  # of samples, newest steps and evaluations first
_NAME = re.compile(r"(?:eval_.+|step)_(\d+)")
_CALL = re.compile(r"<tool_call>")
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class TurnBox:
    """A turn on a page."""

    title: str
    facts: Sequence[str]
    text: str
    is_model: bool
    images: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SequenceBox:
    """A sequence of an episode: the main one or a branch."""

    title: str
    turns: Sequence[TurnBox]


@dataclass(frozen=True, slots=True)
class EpisodePage:
    """An episode: its row in the report, and its page."""

    name: str  # of its file, without the suffix
    title: str
    facts: Mapping[str, str]
    sequences: Sequence[SequenceBox]
    error: str = ""


def pages(directory: Path) -> list[EpisodePage]:
    """Return the newest episodes of a run directory that have a transcript."""
    samples = directory / "samples"
    files = [path for path in samples.glob("*.jsonl") if _NAME.fullmatch(path.stem)]
    files.sort(key=lambda path: (_number(path), path.name), reverse=True)
    return [
        _page(path.stem, record, samples)
        for path in files[:_FILES]
        for record in run_directory.records(path)
        if record.get("transcript")
    ]


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.stem)
    return int(match[1]) if match else 0


def _page(source: str, record: Mapping[str, Any], samples: Path) -> EpisodePage:
    group, index = record.get("group_id"), record.get("index")
    entries = record["transcript"]
    turns = [turn for entry in entries for turn in entry["turns"]]
    spoken = [turn for turn in turns if turn["by"] == _MODEL]
    facts = {
        "reward": _number_text(record.get("reward")),
        "status": str(record.get("status") or ""),
        "cut off": str(record.get("timed_out") or ""),
        "turns": str(len(spoken)),
        "tool calls": str(sum(len(_CALL.findall(turn["text"])) for turn in spoken)),
        "sampled tokens": f"{sum(turn['tokens'] for turn in spoken):,}",
        "other tokens": f"{sum(turn['tokens'] for turn in turns if turn['by'] != _MODEL):,}",
        "branches": str(len(entries)),
        "weights": ", ".join(map(str, sorted(set(record.get("weight_versions") or ())))),
    }
    facts |= {
        f"reward of {seat}": _number_text(reward)
        for seat, reward in (record.get("seat_rewards") or {}).items()
    }
    return EpisodePage(
        f"{source}-{group}-{index}",
        f"{source.replace('_', ' ')}, group {group}, sample {index}",
        {name: value for name, value in facts.items() if value},
        [_sequence(number, entry, samples) for number, entry in enumerate(entries)],
        str(record.get("error") or ""),
    )


def _sequence(number: int, entry: Mapping[str, Any], samples: Path) -> SequenceBox:
    title = f"Branch {number + 1}" + (f" of {entry['seat']}" if entry.get("seat") else "")
    if "after" in entry:
        title += f", after turn {entry['after'] + 1}"
    return SequenceBox(title, list(_turns(entry["turns"], samples)))


def _turns(turns: Sequence[Mapping[str, Any]], samples: Path) -> Iterator[TurnBox]:
    for place, turn in enumerate(turns):
        is_model = turn["by"] == _MODEL
        facts = [f"{turn['tokens']:,} tokens"]
        if is_model and turn.get("finish") == "length":
            facts.append("cut at its limit")
        if turn.get("stop"):
            facts.append(f"stopped at {turn['stop']!r}")
        if turn.get("reward"):
            facts.append(f"reward {_number_text(turn['reward'])}")
        number = turn.get("turn", place // 2)
        title = f"Turn {number + 1}" if is_model else "Context"
        images = thumbnail.data_urls(samples, turn.get("images") or ())
        yield TurnBox(title, facts, turn["text"], is_model, images)


def _number_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
