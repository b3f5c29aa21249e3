"""The configuration that a judging process gets at its start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Configuration:
    """function: the user's, "" for the built-in rewards. memory: bytes. The rest: seconds."""

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


_of_this_process: list[Configuration] = []


def set_current(configuration: Configuration) -> None:
    """Make it this process's; a judging process does so before it loads any reward."""
    _of_this_process[:] = [configuration]


def current() -> Configuration:
    """This process's configuration; the defaults in a process that was told none."""
    return _of_this_process[0] if _of_this_process else Configuration()
