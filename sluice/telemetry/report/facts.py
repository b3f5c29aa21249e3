"""A run's outcome, settings and places, in words for a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.telemetry import health, run_directory
from sluice.telemetry.run_warnings import RunWarning

_OUTCOME = {
    "state": "state",
    "steps": "steps",
    "reward_first": "first reward",
    "reward_last": "last reward",
    "loss_first": "first loss",
    "loss_last": "last loss",
    "eval_first": "held out, first",
    "eval_last": "held out, last",
    "restarts": "restarts",
    "goodput": "goodput",
    "plan": "plan",
    "logprob_diff_max": "largest log-prob difference",
}
_PARTS = {
    "start": "trainer, start",
    "steps": "trainer, all steps",
    "end": "trainer, after the last step",
}
_BOOKS = {
    "samples_trained": "samples trained",
    "groups_leased": "prompts started",
    "groups_trained": "trained",
    "groups_filtered": "filtered",
    "groups_failed": "failed",
    "groups_open": "in work at the end",
    "groups_lost": "lost",
    "groups_trained_twice": "trained twice",
}
_SHOWN_ALWAYS = ("groups_lost", "groups_trained_twice", "restarts")


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and its value, as text."""

    name: str
    value: str


def outcome(summary: Mapping[str, Any]) -> list[Fact]:
    """The result of the run."""
    facts = _facts(summary, _OUTCOME)
    if seconds := summary.get("wall_seconds"):
        facts.insert(1, Fact("took", _duration(seconds)))
    for part, value in (summary.get("trainer_seconds") or {}).items():
        facts.append(Fact(_PARTS[part], _duration(value)))
    return facts


def group_facts(summary: Mapping[str, Any]) -> list[Fact]:
    """The account of every prompt: started = trained + filtered + failed + in work."""
    return _facts(summary, _BOOKS)


def settings(directory: Path) -> list[Fact]:
    """The fields that the manifest sets, under their dotted names."""
    spec = _read(directory / run_directory.JOB).get("spec") or {}
    return [Fact(name, _text(value)) for name, value in _flat(spec)]


def run_facts(directory: Path, steps: Mapping[int, Mapping[str, Any]]) -> list[Fact]:
    """Where the run lies, when it trained, and what it ran on."""
    facts = [Fact("directory", str(directory.resolve()))]
    checkpoints = directory / "checkpoints"
    if (checkpoints / "hf").exists():
        facts.append(Fact("final model", str((checkpoints / "hf").resolve())))
    times = [float(record["time"]) for record in steps.values() if "time" in record]
    if times:
        facts.append(Fact("first step", _date(min(times))))
        facts.append(Fact("last step", _date(max(times))))
    versions = _read(directory / run_directory.VERSIONS)
    return facts + [Fact(name, str(version)) for name, version in versions.items()]


def operator_warnings(directory: Path) -> list[str]:
    """Warnings of the operator in their order: restarts, and what of."""
    events = run_directory.records(directory / run_directory.EVENTS)
    return [
        f"{event['time'][:19]} {event['reason']}: {event['message']}"
        for event in events
        if event.get("type") == "Warning"
    ]


def warnings(summary: Mapping[str, Any]) -> list[RunWarning]:
    """Warnings of the run as a whole. The other ones follow from the metrics, which may be newer.

    Releases until November 2026 wrote the texts alone.
    """
    told = [RunWarning(**one) for one in summary.get("warnings", []) if isinstance(one, dict)]
    return [warning for warning in told if warning.kind not in health.RULES]


def summary_of(directory: Path) -> dict[str, Any]:
    """summary.json; empty while the run is under way."""
    return _read(directory / run_directory.SUMMARY)


def _facts(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Fact]:
    known = {key: values[key] for key in names if values.get(key) is not None}
    return [
        Fact(names[key], _text(value, share=key == "goodput"))
        for key, value in known.items()
        if value or not key.startswith(("groups_", "plan")) or key in _SHOWN_ALWAYS
    ]


def _text(value: Any, *, share: bool = False) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.0%}" if share else f"{value:.4g}"
    return json.dumps(value, ensure_ascii=False)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _flat(each, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", each


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _date(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")
