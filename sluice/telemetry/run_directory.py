"""The run directory: what a run leaves behind for people and tools.

    job.json         the resolved manifest            metrics.jsonl   one line per trained step
    logs/            one file per process             samples/        prompts, responses, rewards
    tensorboard/     event files                      evaluation.jsonl one line per evaluation
    timeline.jsonl   what each role did when          summary.json, report.html, episodes/
    seconds.jsonl    the trainer's seconds before its first and after its last step, by phase
    failures.jsonl   groups that failed for good, and why
    events.jsonl     events of the operator, such as restarts
    versions.json    releases of the software that trained, and its device
    totals.json      the buffer's counters when the trainer was done
    rollouts/        all samples of each step, if debug.dumpRollouts is set
    profiles/        traces and memory of the steps that debug.profile names
    sources.json     the version of each URI that the run uses
    trackers/        how far each tracker has read

A step that is trained again after a restart is written again. Readers take the last line of a step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
FAILURES = "failures.jsonl"
TIMELINE = "timeline.jsonl"
SECONDS = "seconds.jsonl"
SUMMARY = "summary.json"
JOB = "job.json"
SOURCES = "sources.json"
EVENTS = "events.jsonl"
VERSIONS = "versions.json"
TOTALS = "totals.json"
PROFILES = "profiles"


def append(path: Path, record: dict[str, Any]) -> None:
    """Append one line.

    A process that dies while writing leaves one broken line, which readers skip.
    """
    with path.open("ab") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all complete lines of a file; nothing if the file does not exist."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from parse(file)


def parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of lines, without lines that were cut off by a kill."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def by_step(path: Path, key: str = "step") -> dict[int, dict[str, Any]]:
    """Return the last record of each step, in order of steps."""
    latest = {int(record[key]): record for record in records(path) if key in record}
    return dict(sorted(latest.items()))


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested objects by name, such as `rollout.batchSize`."""
    for key, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            yield from leaves(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
