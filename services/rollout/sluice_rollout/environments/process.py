"""Runs one program to its end, and ends all that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice_rollout.environments import keeper

KEPT_BYTES = 16 * 1024
"""Of what a program writes to one of its outputs; the last ones."""
_CLOSE_SECONDS = 5.0
_OUT, _ERR = 1, 2


@dataclass(frozen=True, slots=True)
class Ended:
    """status: as a shell knows it; negative: the number of the signal that ended it. out, err: the
    last that it wrote.
    """

    status: int
    out: str
    err: str

    @property
    def how(self) -> str:
        """The end in words."""
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was ended by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was ended by signal {-self.status}"


@dataclass
class Process(asyncio.SubprocessProtocol):
    """A program in a session of its own. (asyncio's Process waits for the end of all that holds
    its outputs open, its children among them.)
    """

    exited: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    written: dict[int, bytearray] = field(
        default_factory=lambda: {_OUT: bytearray(), _ERR: bytearray()}
    )

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.written[fd] += data
        del self.written[fd][:-KEPT_BYTES]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def text(self, fd: int) -> str:
        return self.written[fd].decode(errors="replace").strip()


async def run(command: Sequence[str], directory: str, variables: Mapping[str, str]) -> Ended:
    """Run a program in its episode's directory until it ends, or this is cancelled; and end what
    it has started.

    Raises OSError where it cannot be started, SurvivorError where something does not end.
    """
    transport, process = await asyncio.get_running_loop().subprocess_exec(
        Process,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        cwd=directory,
        env=variables,
        start_new_session=True,
    )
    try:
        await process.exited.wait()
    finally:
        _kill_group(transport.get_pid())
        await asyncio.shield(asyncio.to_thread(keeper.end, directory))
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await process.closed.wait()  # what it wrote last
    except TimeoutError:
        transport.close()  # a process without our mark holds its outputs
    return Ended(transport.get_returncode() or 0, process.text(_OUT), process.text(_ERR))


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody of it is left
        os.killpg(group, signal.SIGKILL)
