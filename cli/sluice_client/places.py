"""The place where jobs run, as a client uses it."""

from __future__ import annotations

from typing import Any, Protocol

from sluice_cli.status.listing import Listed
from sluice_client.files import Submission
from sluice_operator.cluster.view import Reader


class Place(Protocol):
    """A cluster's namespace, or the runs of this machine. All calls may raise ClientError."""

    here: bool
    """True: files of this machine are there."""

    async def submit(self, submission: Submission) -> str:
        """The name of the job, which is there."""
        ...

    def reader(self, name: str) -> Reader: ...

    async def listed(self) -> list[Listed]: ...

    async def suspend(self, name: str, suspend: bool) -> None: ...

    async def scale(self, name: str, replicas: int) -> None: ...

    async def delete(self, name: str) -> None: ...

    async def records(self, name: str, file: str) -> list[dict[str, Any]]:
        """The lines of a JSONL file of the run directory; empty where there is none yet."""
        ...

    async def newest(self, name: str, pattern: str) -> str | None:
        """The last file of the run directory of this pattern, by name."""
        ...

    async def close(self) -> None: ...
