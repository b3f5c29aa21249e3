"""`sluice status`: one job, once or until it ends."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live

from sluice_cli.options import say
from sluice_cli.output import Format, written
from sluice_cli.status.jobs import reading
from sluice_cli.status.view import show, status_of
from sluice_operator.cluster.view import Picture, Reader
from sluice_operator.plan import is_finished

REFRESH_SECONDS = 2.0


def print_status(
    name: str | None,
    namespace: str | None,
    run_dir: Path | None,
    *,
    watch: bool,
    form: Format = Format.TEXT,
) -> None:
    """form: with another than text one answer, also with `watch`: once the job has ended.

    ReadError: it cannot be read.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if form is Format.TEXT:
            asyncio.run(_print(name, namespace, run_dir, watch))
        else:
            picture = asyncio.run(_picture(name, namespace, run_dir, watch))
            say(written(picture.facts(), form))


async def _picture(
    name: str | None, namespace: str | None, run_dir: Path | None, watch: bool
) -> Picture:
    """The job as it is now; with `watch`, as it ended."""
    async with reading(name, namespace, run_dir) as reader:
        while True:
            picture = await reader.picture()
            if not watch or is_finished(status_of(picture.job)):
                return picture
            await asyncio.sleep(REFRESH_SECONDS)


async def _print(
    name: str | None, namespace: str | None, run_dir: Path | None, watch: bool
) -> None:
    console = Console(soft_wrap=False)
    async with reading(name, namespace, run_dir) as reader:
        if watch:
            await _watch(reader, console)
        else:
            console.print(show(await reader.picture(), datetime.now(UTC)))


async def _watch(reader: Reader, console: Console) -> None:
    """Until the job has ended. Elsewhere than on a terminal only what is new is printed, and so it
    can be kept.
    """
    with (
        Live(console=console, auto_refresh=False)
        if console.is_terminal
        else contextlib.nullcontext() as live
    ):
        before: object = None
        while True:
            picture = await reader.picture()
            if live is not None:
                live.update(show(picture, datetime.now(UTC)), refresh=True)
            elif (picture.job.get("status"), picture.events) != before:
                before = (picture.job.get("status"), picture.events)
                console.print(show(picture, datetime.now(UTC)), "")
            if is_finished(status_of(picture.job)):
                return
            await asyncio.sleep(REFRESH_SECONDS)
