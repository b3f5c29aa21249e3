"""`sluice logs`: the logs of a job's containers, merged by time.

Engines and user functions write arbitrary text. Control characters are shown as text, so that a
terminal does not act on them, and lines that are not in sluice's log format are dim.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sluice.telemetry.terminal import escaped
from sluice_cli.status.readers import job_reader
from sluice_client.logs import LogLine, merged
from sluice_operator.cluster.view import LogStream, Reader, ReadError, TimedLine

STYLES = {"trainer": "green", "rollout": "cyan", "buffer": "magenta", "rendezvous": "yellow"}
# Seconds between two looks for new pods.
POLL_SECONDS = 2.0
# Lines of a followed log that arrive within this time are sorted.
GATHER_SECONDS = 0.2

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SLUICE_LINE = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ [a-z]+ |\{.*"timestamp": "|error: ')


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The logs to print. A field that is None selects everything."""

    role: str | None = None
    replica: int | None = None
    container: str | None = None
    attempt: int | None = None
    # Number of last lines of each log.
    tail: int | None = None

    def selects(self, stream: LogStream) -> bool:
        return (
            self.role in (None, stream.role)
            and self.replica in (None, stream.replica)
            and self.container in (None, stream.container)
            and self.attempt in (None, stream.attempt)
        )

    def __str__(self) -> str:
        named = {
            "role": self.role,
            "replica": self.replica,
            "container": self.container,
            "attempt": self.attempt,
        }
        chosen = ", ".join(f"{key} {value}" for key, value in named.items() if value is not None)
        return f" with {chosen}" if chosen else ""


def rendered(line: LogLine, width: int) -> Text:
    """Return a line behind the name of its log, which is padded to `width` characters."""
    # Engines colour their lines; here the colour of a name shows the role.
    text = _COLOURS.sub("", line.text).removesuffix("\r")
    return Text.assemble(
        (f"{line.stream.name:<{width}} | ", STYLES.get(line.stream.role, "")),
        (escaped(text), "" if _SLUICE_LINE.match(text) else "dim"),
    )


def print_logs(
    name: str | None,
    namespace: str | None,
    run_dir: Path | None,
    selected: LogFilter,
    *,
    follow: bool,
) -> None:
    """Print the selected logs; with `follow`, until the job has ended.

    Raises ReadError if there are no such logs, or none can be read.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_print(name, namespace, run_dir, selected, follow))


async def _print(
    name: str | None, namespace: str | None, run_dir: Path | None, selected: LogFilter, follow: bool
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    async with job_reader(name, namespace, run_dir) as reader:
        printer = Printer(reader, selected, console, errors)
        await (printer.follow() if follow else printer.once())


class Printer:
    """Prints the selected logs of one job."""

    def __init__(
        self, reader: Reader, selected: LogFilter, console: Console, errors: Console
    ) -> None:
        self._reader, self._selected = reader, selected
        self._console, self._errors = console, errors
        self._width = 0
        self._reported: set[str] = set()

    async def once(self) -> None:
        """Print the logs as they are now.

        A log that cannot be read is reported, and the others are printed. Raises ReadError if no
        log can be read.
        """
        streams, _ = await self._streams()
        if not streams:
            raise ReadError(f"there are no logs{self._selected}: no such pod exists (any longer)")
        results = await asyncio.gather(*(self._read(stream) for stream in streams))
        if not any(isinstance(result, list) for result in results):
            raise ReadError("\n".join(str(result) for result in results))
        for result in results:
            if isinstance(result, ReadError):
                self._report(str(result))
        read = [
            (stream, result)
            for stream, result in zip(streams, results, strict=True)
            if isinstance(result, list)
        ]
        for line in merged(read):
            self._console.print(rendered(line, self._width))

    async def follow(self) -> None:
        """Print the logs from their start, with new lines and new pods, until the job has ended."""
        lines: asyncio.Queue[LogLine] = asyncio.Queue()
        reading: dict[LogStream, asyncio.Task[None]] = {}
        printing = asyncio.create_task(self._print_forever(lines))
        try:
            while True:
                streams, ended = await self._streams()
                for stream in streams:
                    if not stream.silent and stream not in reading:
                        reading[stream] = asyncio.create_task(self._read_into(lines, stream))
                if ended and all(task.done() for task in reading.values()):
                    break
                await asyncio.sleep(POLL_SECONDS)
            # The last lines may still wait to be sorted.
            await asyncio.sleep(2 * GATHER_SECONDS)
        finally:
            for task in [printing, *reading.values()]:
                task.cancel()

    async def _streams(self) -> tuple[list[LogStream], bool]:
        streams, ended = await self._reader.streams()
        streams = [stream for stream in streams if self._selected.selects(stream)]
        self._width = max([len(stream.name) for stream in streams], default=self._width)
        return streams, ended

    async def _read(self, stream: LogStream) -> list[TimedLine] | ReadError:
        if stream.silent:
            return ReadError(f"{stream.name} has no log yet: {stream.silent}")
        try:
            return [
                line
                async for line in self._reader.lines(stream, follow=False, tail=self._selected.tail)
            ]
        except ReadError as error:
            return error

    async def _read_into(self, lines: asyncio.Queue[LogLine], stream: LogStream) -> None:
        try:
            async for time, text in self._reader.lines(
                stream, follow=True, tail=self._selected.tail
            ):
                lines.put_nowait(LogLine(stream, time, text))
        except ReadError as error:
            self._report(str(error))

    async def _print_forever(self, lines: asyncio.Queue[LogLine]) -> None:
        async for batch in _batches(lines):
            logs: dict[LogStream, list[TimedLine]] = {}
            for line in batch:
                logs.setdefault(line.stream, []).append((line.time, line.text))
            for line in merged([*logs.items()]):
                self._console.print(rendered(line, self._width))

    def _report(self, text: str) -> None:
        """Print a problem to standard error, once."""
        if text not in self._reported:
            self._reported.add(text)
            self._errors.print(Text(text, style="yellow"))


async def _batches(lines: asyncio.Queue[LogLine]) -> AsyncIterator[list[LogLine]]:
    while True:
        batch = [await lines.get()]
        await asyncio.sleep(GATHER_SECONDS)
        while not lines.empty():
            batch.append(lines.get_nowait())
        yield batch
