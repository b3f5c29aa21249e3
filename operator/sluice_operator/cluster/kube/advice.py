"""What an API server warns of in an answer: fields on their way out, a pod that a stricter namespace would refuse.

It comes in the header `Warning` of a request that succeeds, with each object of the kind again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from sluice_operator.plan.model import Event

SERVER_WARNING = "ServerWarning"
_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')


def warnings_of(headers: Iterable[str]) -> list[str]:
    """The texts in the values of `Warning` headers (RFC 7234, section 5.5)."""
    return [re.sub(r"\\(.)", r"\1", text) for header in headers for text in _WARNING.findall(header)]


class Advice:
    """Remembers what each job's user was told. `said`: (kind, name, text) of one pass."""

    def __init__(self) -> None:
        self._told: dict[str, set[tuple[str, str]]] = defaultdict(set)

    def news(self, job_uid: str, said: Iterable[tuple[str, str, str]]) -> list[Event]:
        """An event for each text that is new for its kind: later pods of a job get the same."""
        told, events = self._told[job_uid], []
        for kind, name, text in said:
            if (kind, text) not in told:
                told.add((kind, text))
                events.append(Event("Warning", SERVER_WARNING, f"{kind} {name}: {text}"))
        return events

    def forget(self, job_uid: str) -> None:
        self._told.pop(job_uid, None)
