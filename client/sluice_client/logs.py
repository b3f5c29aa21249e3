"""Lines of several containers' logs as one log in the order of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sluice_operator.cluster.view import LogStream, TimedLine


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a container's log."""

    stream: LogStream
    time: datetime
    text: str


def merged(logs: Sequence[tuple[LogStream, Iterable[TimedLine]]]) -> Iterator[LogLine]:
    """Merge logs by time. Lines of one log keep their order, whatever times they carry."""
    return heapq.merge(
        *(_monotonic(stream, lines) for stream, lines in logs), key=lambda line: line.time
    )


def _monotonic(stream: LogStream, lines: Iterable[TimedLine]) -> Iterator[LogLine]:
    latest: datetime | None = None
    for time, text in lines:
        latest = max(time, latest) if latest else time
        yield LogLine(stream, latest, text)
