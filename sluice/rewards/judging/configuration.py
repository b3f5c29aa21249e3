"""Configuration of a judging process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings of a judging process.

    Attributes
    ----------
    function
        Dotted name of the user's function; "" for the built-in rewards.
    key
        Part of the value that is the reward.
    memory
        Address space in bytes.
    cpu_seconds
        Processor time of one job.
    timeout_seconds
        Wall time of one job.
    test_seconds
        Wall time of one test of a program.
    imports
        Modules to import before the first job.

    """

    function: str = ""
    key: str | None = None
    memory: int = 2 << 30
    cpu_seconds: int = 60
    timeout_seconds: float = 30.0
    test_seconds: float = 6.0
    imports: tuple[str, ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Configuration:
        fields = json.loads(text)
        return Configuration(**fields | {"imports": tuple(fields["imports"])})


_current: list[Configuration] = []


def set_current(configuration: Configuration) -> None:
    """Set this process's configuration. A judging process calls it before it loads any reward."""
    _current[:] = [configuration]


def current() -> Configuration:
    """Return this process's configuration, or the defaults if it was not set."""
    return _current[0] if _current else Configuration()
