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
from sluice_cli.status.readers import job_reader
from sluice_client.status_view import render_status, status_of
from sluice_operator.cluster.view import JobSnapshot, Reader
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
    """Print the status of a job; with `watch`, until the job has ended.

    JSON and YAML are printed once: with `watch`, after the end. Raises ReadError.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if form is Format.TEXT:
            asyncio.run(_print(name, namespace, run_dir, watch))
        else:
            snapshot = asyncio.run(_snapshot(name, namespace, run_dir, watch))
            say(written(snapshot.facts(), form))


async def _snapshot(
    name: str | None, namespace: str | None, run_dir: Path | None, watch: bool
) -> JobSnapshot:
    """Read the job as it is now; with `watch`, as it is after its end."""
    async with job_reader(name, namespace, run_dir) as reader:
        while True:
            snapshot = await reader.snapshot()
            if not watch or is_finished(status_of(snapshot.job)):
                return snapshot
            await asyncio.sleep(REFRESH_SECONDS)


async def _print(
    name: str | None, namespace: str | None, run_dir: Path | None, watch: bool
) -> None:
    console = Console(soft_wrap=False)
    async with job_reader(name, namespace, run_dir) as reader:
        if watch:
            await _watch(reader, console)
        else:
            console.print(render_status(await reader.snapshot(), datetime.now(UTC)))


async def _watch(reader: Reader, console: Console) -> None:
    """Show the job until it has ended.

    A terminal shows one view that changes. A file or pipe gets a new view for each change.
    """
    with (
        Live(console=console, auto_refresh=False)
        if console.is_terminal
        else contextlib.nullcontext() as live
    ):
        before: object = None
        while True:
            snapshot = await reader.snapshot()
            if live is not None:
                live.update(render_status(snapshot, datetime.now(UTC)), refresh=True)
            elif (snapshot.job.get("status"), snapshot.events) != before:
                before = (snapshot.job.get("status"), snapshot.events)
                console.print(render_status(snapshot, datetime.now(UTC)), "")
            if is_finished(status_of(snapshot.job)):
                return
            await asyncio.sleep(REFRESH_SECONDS)
