"""Runs a program until it ends, then ends all processes that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sluice_rollout.environments import orphan_reaper

KEPT_BYTES = 16 * 1024  # of each output of a program
_CLOSE_SECONDS = 5.0
_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 2000
_OUT, _ERR = 1, 2


@dataclass(frozen=True, slots=True)
class ProgramExit:
    """The end of a program: its exit status, and the last of its outputs."""

    status: int  # negative: the number of the signal that ended it
    out: str
    err: str

    @property
    def how(self) -> str:
        """The status in words."""
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was ended by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was ended by signal {-self.status}"

    @property
    def failure(self) -> str:
        """The status, the last line of the errors, and the lines before that."""
        lines = self.err.splitlines()[-_SHOWN_LINES:]
        last = f": {lines[-1]}" if lines else ""
        return "\n".join([self.how + last, *lines[:-1]])[:_SHOWN_CHARACTERS]


# The end of a program that was killed, because the time of its episode had passed.
KILLED = ProgramExit(-signal.SIGKILL, "", "")


@dataclass
class Tail:
    """The last bytes that are written to an output."""

    _kept: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-KEPT_BYTES]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


@dataclass
class ChildProcess(asyncio.SubprocessProtocol):
    """A program in a new session.

    asyncio's Process would wait for all processes that hold the outputs open, including children.
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
        """Return the end of a program that has exited."""
        if not await wait_closed(self.closed):
            transport.close()
        out, err = self.written[_OUT].text, self.written[_ERR].text
        return ProgramExit(transport.get_returncode() or 0, out, err)


@dataclass
class OutputPipe(asyncio.Protocol):
    """An output of a process that another process starts."""

    end: int  # the descriptor to write to
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    tail: Tail = field(default_factory=Tail)

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[OutputPipe]:
        """Open a pipe and read it."""
        reading, writing = os.pipe()
        output = cls(writing)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: output, os.fdopen(reading, "rb", 0)
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
        """Close the writing end here, after the other process has received it."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1


async def wait_closed(*outputs: asyncio.Event) -> bool:
    """Wait until outputs are closed. Returns False if a process without the mark holds one open."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            for output in outputs:
                await output.wait()
    except TimeoutError:
        return False
    return True


async def run(command: Sequence[str], directory: str, variables: Mapping[str, str]) -> ProgramExit:
    """Run a program in its episode's directory until it ends or this task is cancelled.

    All processes that it has started are ended as well.

    Raises
    ------
    OSError
        The program cannot be started.
    SurvivorError
        A process of the program does not end.

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
    """Kill a group of processes, if it still exists."""
    with contextlib.suppress(ProcessLookupError):  # the group has ended
        os.killpg(group, signal.SIGKILL)
