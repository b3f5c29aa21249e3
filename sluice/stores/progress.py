"""How far a fetch is, as `sluice.stores.fetch` logs it and the operator reads it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from sluice.stores.amounts import progress_text
from sluice.telemetry import logs, terminal
from sluice.uri import Uri

_EVENT = "fetching"
_LINE = re.compile(rf" {_EVENT} uri=(?P<uri>\S+) arrived=(?P<arrived>.+)$")
_LONGEST = 500
# Seconds between two lines, and the share of the newest speed in the one that is shown.
_LOG_SECONDS = 10.0
_WEIGHT = 0.5


class LoggedProgress:
    """Writes how much of a URI has arrived into the log, now and then.

    Attributes
    ----------
    done
        The most bytes that have arrived so far.

    """

    def __init__(self, uri: Uri) -> None:
        self.done, self._uri = 0, uri
        self._shown_at, self._shown, self._rate = 0.0, 0, 0.0

    def __call__(self, done: int, total: int) -> None:
        self.done, now = max(self.done, done), time.monotonic()
        if self._shown_at and now - self._shown_at < _LOG_SECONDS and done < total:
            return
        if self._shown_at and now > self._shown_at:
            rate = max(done - self._shown, 0) / (now - self._shown_at)
            self._rate = _WEIGHT * rate + (1 - _WEIGHT) * (self._rate or rate)
        self._shown_at, self._shown = now, done
        arrived = progress_text(done, total, self._rate)
        logs.get().info(_EVENT, uri=str(self._uri), arrived=arrived)


def last_progress(log: str) -> str:
    """Return the newest progress in a log, such as `hf://org/x: 41.0 of 61.4 GB`; else empty."""
    for line in reversed(log.splitlines()):
        fields = _fields(line)
        if fields is not None:
            text = f"{fields.get('uri')}: {fields.get('arrived')}"
            # Whatever else the container prints: it may be changed by the job's template.
            return terminal.escaped(text[:_LONGEST])
    return ""


def _fields(line: str) -> dict[str, Any] | None:
    if match := _LINE.search(line):
        return match.groupdict()
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and fields.get("event") == _EVENT else None
