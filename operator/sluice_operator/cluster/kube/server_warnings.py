"""Warnings in the answers of an API server, such as deprecated fields.

They come in the header `Warning` of a request that succeeds, again for each object of the kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

import structlog

from sluice_operator.plan.facts.model import Event, KubeObject

SERVER_WARNING = "ServerWarning"
ServerWarning = tuple[str, str, str]  # kind and name of an object, and the text
_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')

log = structlog.get_logger(__name__)


def warnings_of(headers: Iterable[str]) -> list[str]:
    """Return the texts in the values of `Warning` headers (RFC 7234, section 5.5)."""
    return [
        re.sub(r"\\(.)", r"\1", text) for header in headers for text in _WARNING.findall(header)
    ]


def collector(warnings: list[ServerWarning], manifest: KubeObject) -> Callable[[str], None]:
    """Return a function that adds a warning about an object to the list."""
    return lambda text: warnings.append((manifest["kind"], manifest["metadata"]["name"], text))


class ServerWarnings:
    """Remembers which warnings were reported for each job."""

    def __init__(self) -> None:
        self._reported: dict[str, set[tuple[str, str]]] = defaultdict(set)

    def news(self, job_uid: str, warnings: Iterable[ServerWarning]) -> list[Event]:
        """Return an event for each warning that is new for its kind of object, and log it.

        Later pods of a job get the same warnings again.
        """
        reported, events = self._reported[job_uid], []
        for kind, name, text in warnings:
            if (kind, text) not in reported:
                reported.add((kind, text))
                events.append(Event("Warning", SERVER_WARNING, f"{kind} {name}: {text}"))
                log.warning("the API server warns", message=events[-1].message)
        return events

    def forget(self, job_uid: str) -> None:
        self._reported.pop(job_uid, None)
