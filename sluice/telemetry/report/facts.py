"""Outcome, settings and facts of a run, as text for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    "eval_first": "first held-out reward",
    "eval_last": "last held-out reward",
    "restarts": "restarts",
    "goodput": "goodput",
    "plan": "plan",
    "logprob_diff_max": "largest log-prob difference",
}
_PARTS = {
    "start": "trainer start-up",
    "steps": "trainer steps",
    "end": "trainer wind-down",
}
_GROUPS = {
    "samples_trained": "samples trained",
    "groups_leased": "prompts started",
    "groups_trained": "trained",
    "groups_filtered": "filtered",
    "groups_failed": "failed",
    "groups_open": "unfinished at the end",
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
    """Return the result of the run."""
    facts = _facts(summary, _OUTCOME)
    if seconds := summary.get("wall_seconds"):
        facts.insert(1, Fact("duration", _duration(seconds)))
    for part, value in (summary.get("trainer_seconds") or {}).items():
        facts.append(Fact(_PARTS[part], _duration(value)))
    return facts


def group_facts(summary: Mapping[str, Any]) -> list[Fact]:
    """Return the outcome of every prompt: started = trained + filtered + failed + in work."""
    return _facts(summary, _GROUPS)


def settings(directory: Path) -> list[Fact]:
    """Return the fields that the manifest sets, under their dotted names."""
    spec = _read(directory / run_directory.JOB).get("spec") or {}
    return [Fact(name, _text(value)) for name, value in run_directory.leaves(spec)]


def run_facts(directory: Path, steps: Mapping[int, Mapping[str, Any]]) -> list[Fact]:
    """Return the run's directory, training times and software."""
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
    """Return the operator's warnings in order, such as restarts and their reasons."""
    events = run_directory.records(directory / run_directory.EVENTS)
    return [
        f"{event['time'][:19]} {event['reason']}: {event['message']}"
        for event in events
        if event.get("type") == "Warning"
    ]


def warnings(summary: Mapping[str, Any]) -> list[RunWarning]:
    """Return warnings of the run as a whole.

    The others follow from the metrics, which may be newer.

    Releases until November 2026 wrote the texts alone.
    """
    entries = (entry for entry in summary.get("warnings", []) if isinstance(entry, dict))
    return [
        warning
        for warning in (RunWarning(**entry) for entry in entries)
        if warning.kind not in health.RULES
    ]


def summary_of(directory: Path) -> dict[str, Any]:
    """Read summary.json; empty while the run is active."""
    return _read(directory / run_directory.SUMMARY)


def _facts(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Fact]:
    present = {key: values[key] for key in names if values.get(key) is not None}
    return [
        Fact(names[key], _text(value, share=key == "goodput"))
        for key, value in present.items()
        if value or not key.startswith(("groups_", "plan")) or key in _SHOWN_ALWAYS
    ]


def _text(value: Any, *, share: bool = False) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.0%}" if share else f"{value:.4g}"
    return json.dumps(value, ensure_ascii=False)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _date(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")
