"""Warnings in the answers of an API server: fields on their way out, a pod that a stricter
namespace would refuse.

It comes in the header `Warning` of a request that succeeds, with each object of the kind again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

import structlog

from sluice_operator.plan.facts.model import Event, KubeObject

SERVER_WARNING = "ServerWarning"
Said = tuple[str, str, str]
"""Kind and name of an object, and the text."""
_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')

log = structlog.get_logger(__name__)


def warnings_of(headers: Iterable[str]) -> list[str]:
    """The texts in the values of `Warning` headers (RFC 7234, section 5.5)."""
    return [
        re.sub(r"\\(.)", r"\1", text) for header in headers for text in _WARNING.findall(header)
    ]


def listener(said: list[Said], manifest: KubeObject) -> Callable[[str], None]:
    """Writes down in `said` what the server says of an object."""
    return lambda text: said.append((manifest["kind"], manifest["metadata"]["name"], text))


class ServerWarnings:
    """Remembers what each job's user was told."""

    def __init__(self) -> None:
        self._told: dict[str, set[tuple[str, str]]] = defaultdict(set)

    def news(self, job_uid: str, said: Iterable[Said]) -> list[Event]:
        """An event, and a line of the log, for each text that is new for its kind: a job's later
        pods get the same.
        """
        told, events = self._told[job_uid], []
        for kind, name, text in said:
            if (kind, text) not in told:
                told.add((kind, text))
                events.append(Event("Warning", SERVER_WARNING, f"{kind} {name}: {text}"))
                log.warning("the API server warns", message=events[-1].message)
        return events

    def forget(self, job_uid: str) -> None:
        self._told.pop(job_uid, None)
