"""Runs one program to its end, and ends all that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sluice_rollout.environments import orphan_reaper

KEPT_BYTES = 16 * 1024
"""Of what a program writes to one of its outputs; the last ones."""
_CLOSE_SECONDS = 5.0
_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 2000
_OUT, _ERR = 1, 2


@dataclass(frozen=True, slots=True)
class ProgramExit:
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

    @property
    def failure(self) -> str:
        """The end of a program that failed: the last line of its errors, then those before it."""
        lines = self.err.splitlines()[-_SHOWN_LINES:]
        last = f": {lines[-1]}" if lines else ""
        return "\n".join([self.how + last, *lines[:-1]])[:_SHOWN_CHARACTERS]


@dataclass
class Tail:
    """The last of what is written to an output."""

    _kept: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-KEPT_BYTES]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


@dataclass
class ChildProcess(asyncio.SubprocessProtocol):
    """A program in a session of its own. (asyncio's Process waits for the end of all that holds
    its outputs open, its children among them.)
    """

    exited: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    written: dict[int, Tail] = field(default_factory=lambda: {_OUT: Tail(), _ERR: Tail()})

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.written[fd].add(data)

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    async def ended(self, transport: asyncio.SubprocessTransport) -> ProgramExit:
        """The end of a program that has exited, with what it wrote last."""
        if not await wait_closed(self.closed):
            transport.close()
        out, err = self.written[_OUT].text, self.written[_ERR].text
        return ProgramExit(transport.get_returncode() or 0, out, err)


@dataclass
class OutputPipe(asyncio.Protocol):
    """An output of a process that is started elsewhere. end: the descriptor to write to it."""

    end: int
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    tail: Tail = field(default_factory=Tail)

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[OutputPipe]:
        ours, its = os.pipe()
        output = cls(its)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: output, os.fdopen(ours, "rb", 0)
        )
        try:
            yield output
        finally:
            output.hand_over()
            transport.close()

    def data_received(self, data: bytes) -> None:
        self.tail.add(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def hand_over(self) -> None:
        """Leave the end to the process that has it by now."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1


async def wait_closed(*outputs: asyncio.Event) -> bool:
    """Wait until they are. False: a process without our mark holds one."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            for output in outputs:
                await output.wait()
    except TimeoutError:
        return False
    return True


async def run(command: Sequence[str], directory: str, variables: Mapping[str, str]) -> ProgramExit:
    """Run a program in its episode's directory until it ends, or this is cancelled; and end what
    it has started.

    Raises OSError where it cannot be started, SurvivorError where something does not end.
    """
    transport, process = await asyncio.get_running_loop().subprocess_exec(
        ChildProcess,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        cwd=directory,
        env=variables,
        start_new_session=True,
    )
    try:
        await process.exited.wait()
    finally:
        kill_group(transport.get_pid())
        await asyncio.shield(asyncio.to_thread(orphan_reaper.end_processes, directory))
    return await process.ended(transport)


def kill_group(group: int) -> None:
    """Kill what is left of a group of processes."""
    with contextlib.suppress(ProcessLookupError):  # nobody of it is left
        os.killpg(group, signal.SIGKILL)
