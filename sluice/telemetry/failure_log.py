"""A log of failures that stays readable: each kind is logged in full once, then rarely."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sluice.runtime import error_summary
from sluice.telemetry import logs

EVERY = 100
MOST_KINDS = 1000
_OTHERS = "others"


@dataclass(slots=True)
class FailureLog:
    """Counts failures by kind, which is the first line of an error.

    Logs the first and every hundredth.
    """

    every: int = EVERY
    counts: Counter[str] = field(default_factory=Counter)

    def note(
        self, event: str, error: str | BaseException, details: str = "", **fields: Any
    ) -> None:
        """Count a failure, and log it if it is due.

        Parameters
        ----------
        event
            What failed, for the log line.
        error
            An exception or its text. The first line is the kind.
        details
            More text to show, such as a traceback.
        **fields
            Further fields of the log line.

        """
        if isinstance(error, BaseException):
            details = details or error_summary.formatted_traceback(error)
            error = error_summary.cause(error)
        line, _, rest = error.partition("\n")
        kind = f"{event}: {line}"
        if kind not in self.counts and len(self.counts) >= MOST_KINDS:
            kind = _OTHERS
        self.counts[kind] += 1
        if self.counts[kind] % self.every != 1 % self.every:
            return
        more = "\n".join(part for part in (rest, details) if part)
        logs.get().warning(
            event, error=line, of_this_kind=self.counts[kind], **fields, **_exception(more)
        )


def _exception(text: str) -> dict[str, str]:
    """Return the field whose text a log line shows below itself."""
    return {"exception": text} if text else {}


# The log of this process.
LOG = FailureLog()
