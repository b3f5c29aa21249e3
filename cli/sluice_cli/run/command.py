"""`sluice run`: the reconciler on a LocalCluster, with something to look at."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from sluice.api import ConditionType, ManifestError, RLJob, RLJobStatus, load_job
from sluice.engines import engine_of
from sluice.telemetry import health, run_directory
from sluice.telemetry.run_warnings import RunWarning
from sluice.wire.tls import PLAIN, Tls
from sluice.wire.v1.buffer_pb2 import BufferStats
from sluice.wire.v1.rendezvous_pb2 import Ledger
from sluice_cli.exits import Exit
from sluice_cli.run import containers as images
from sluice_cli.run.ending import finish, write_summary
from sluice_cli.run.monitor import Monitor, Snapshot
from sluice_cli.run.run_files import RunFiles
from sluice_cli.run.view import LiveView, PlainView, View
from sluice_cli.validate import file_checks, footprint
from sluice_cli.validate.missing_files import check_files
from sluice_client.resolve import resolve
from sluice_client.resume_changes import LENGTH_FIELDS, change_notes
from sluice_client.run_dir import locked, prepare
from sluice_operator.cluster.local import gpus, run_state
from sluice_operator.cluster.local.cluster import LocalCluster
from sluice_operator.plan import Observed, Plan, Progress
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests.objects import rendezvous_address
from sluice_operator.plan.manifests.render import render_all
from sluice_operator.progress import progress_of
from sluice_operator.reconcile import cancelled_by_signals, run_job

REFRESH_SECONDS = 0.5
CHECKED_ROWS = 1000
"""Rows of each prompt file that are looked at before anything is started; the buffer looks at all.
"""
ENDS: tuple[ConditionType, ConditionType] = ("Failed", "Succeeded")
"""A failed run is tried again. One that has succeeded goes on only where it has become longer."""

OVER = (
    "this run has succeeded before, and nothing is trained now: --fresh throws it away and begins "
    "again, more trainer.steps go on with it"
)


def run_here(
    path: Path,
    overrides: list[str],
    run_dir: Path | None,
    *,
    fresh: bool,
    plain: bool,
    containers: str | None = None,
) -> int:
    """Run or continue a job. containers: podman or docker, for programs that have an image.

    Answers the exit code: 0 Succeeded, 1 Failed, 130 stopped and to be continued.
    """
    job = resolve(load_job(path, overrides), path.resolve().parent)
    check_files(job)
    file_checks.look(job, rows=CHECKED_ROWS).raise_problems()
    check_gpus(job)
    if problem := footprint.shortage(job):
        raise ManifestError(problem)
    check_engine(job)
    images.check(job, containers)
    directory = (run_dir or Path("runs") / job.metadata.name).resolve()
    with run_errors(directory), locked(directory) as lock:
        prepared = prepare(directory, job, fresh=fresh)
        longer = any(change.path in LENGTH_FIELDS for change in prepared.changed)
        over = [OVER] if prepared.succeeded and not longer else []
        console = Console()
        for text in [*change_notes(prepared.changed, job), *images.words(job, containers), *over]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        view = view_of(console, job, directory, plain=plain)
        try:
            status = asyncio.run(
                _run(job, directory, view, ENDS if longer else ENDS[:1], containers, lock)
            )
        except OSError as error:
            raise ManifestError(
                f"{directory}: the run cannot go on: {error}; when that is mended, the same "
                "command continues it"
            ) from error
        finally:
            view.close()
        return finish(console, directory, job, status)


@contextlib.contextmanager
def quiet_interrupts() -> Iterator[None]:
    """End without a traceback if Ctrl-C comes before the first pod starts or after the last ends.

    In between, the run itself stops its pods.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues the run")
        raise typer.Exit(Exit.STOPPED) from None


@contextlib.contextmanager
def run_errors(directory: Path) -> Iterator[None]:
    """Tell in a line why a run directory cannot be used."""
    try:
        yield
    except run_state.RunDirectoryError as error:
        raise ManifestError(str(error)) from error
    except OSError as error:
        raise ManifestError(f"--run-dir {directory}: {error.strerror or error}") from error


def view_of(console: Console, job: RLJob, directory: Path, *, plain: bool) -> View:
    """A live view on a terminal, plain lines elsewhere."""
    if plain or not console.is_terminal:
        console.print(f"run: {directory}", markup=False, highlight=False, soft_wrap=True)
        return PlainView(console)
    return LiveView(console, job, directory)


def check_gpus(job: RLJob) -> None:
    """Raise ManifestError where this machine has not the GPUs that the trainer and one engine need
    at the same time.
    """
    wanted, there = gpus.required_by(render_all(job)), len(gpus.visible_gpus())
    if wanted > there:
        raise ManifestError(
            f"the trainer and one engine need {wanted} GPU(s), and this machine shows {there} "
            "(CUDA_VISIBLE_DEVICES); "
            "to run on CPUs set spec.trainer.gpusPerNode: 0 and spec.rollout.gpusPerReplica: 0"
        )


def check_engine(job: RLJob) -> None:
    """Raise ManifestError where this machine has not the engine that the job starts."""
    containers = (
        c for each in render_all(job) if each["kind"] == "Pod" for c in each["spec"]["containers"]
    )
    if any(c["name"] == "engine" for c in containers) and (
        missing := engine_of(job.spec).launch.missing()
    ):
        raise ManifestError(missing)


async def _run(
    job: RLJob,
    directory: Path,
    view: View,
    reopen: Sequence[ConditionType],
    containers: str | None,
    lock: int,
) -> RLJobStatus | None:
    """Reconcile until the end; None if the user stopped it. lock: of the directory."""
    started = time.monotonic()
    monitor, files = Monitor(directory / run_directory.TIMELINE), RunFiles(directory)
    watch = HealthWarnings(
        health.Watch(files.read()), health.Harvest(job.spec.rollout.batch_size)
    )  # earlier is not news
    status: RLJobStatus | None = None
    volumes = {"run": directory, "checkpoint": directory / "checkpoints"}
    variables = images.variables(containers)
    async with LocalCluster(directory, volumes=volumes, env=variables, lock=lock) as cluster:

        async def probe() -> Progress | None:
            observed = await cluster.observe(job)
            address = rendezvous_address(job, observed)
            secret = observed.objects.get(("Secret", names.token_name(job)))
            if address is None or secret is None:
                return None
            snapshot = await monitor.ask(
                address, secret["stringData"][names.TOKEN_KEY], tls_of(job, observed)
            )
            return (
                progress_of(snapshot.stats, snapshot.ledger or Ledger()) if snapshot.stats else None
            )

        def on_plan(plan: Plan) -> None:
            nonlocal status
            status = plan.status
            for event in plan.events:
                view.event(event.type, f"{event.reason}: {event.message}")

        async def refresh() -> None:
            while True:
                show(view, status, monitor.latest, files, watch)
                await asyncio.sleep(REFRESH_SECONDS)

        refreshing = asyncio.create_task(refresh())
        try:
            with cancelled_by_signals():
                status = await run_job(cluster, job, probe=probe, on_plan=on_plan, reopen=reopen)
            stopped = False
        except asyncio.CancelledError:
            stopped = True
        finally:
            refreshing.cancel()
            show(view, status, monitor.latest, files, watch)
            await monitor.close()
    write_summary(
        directory,
        status,
        monitor,
        time.monotonic() - started,
        spec=job.spec,
        warnings=watch.between_steps(),
    )
    return None if stopped else status


@dataclass(frozen=True, slots=True)
class HealthWarnings:
    """Signs that a run is sick, each told once."""

    steps: health.Watch
    harvest: health.Harvest

    def see(self, fresh: list[dict[str, Any]], stats: BufferStats | None) -> Iterator[str]:
        for warning in (warning for record in fresh for warning in self.steps.see(record)):
            yield warning.sentence()
        if stats:
            counters = stats.counters
            fruitless = self.harvest.see(
                stats.step, int(counters["groups_failed"]), int(counters["groups_filtered"])
            )
            if fruitless:
                yield fruitless.sentence()

    def between_steps(self) -> list[RunWarning]:
        """Warnings that no step's metrics tell."""
        return [self.harvest.warning] if self.harvest.warning else []


def show(
    view: View,
    status: RLJobStatus | None,
    snapshot: Snapshot,
    files: RunFiles,
    warnings: HealthWarnings,
) -> None:
    """The present picture; and a warning where a new step looks sick in a way
    that was not told before.
    """
    fresh = files.read()
    view.show(status, snapshot, files, fresh)
    for text in warnings.see(fresh, snapshot.stats):
        view.event("Warning", text)


def tls_of(job: RLJob, observed: Observed) -> Tls:
    """How this run's servers prove themselves."""
    secret = observed.objects.get(("Secret", names.tls_name(job))) if job.spec.tls.enabled else None
    return (
        Tls(secret["stringData"][names.TLS_CA].encode(), names.tls_server_name(job))
        if secret
        else PLAIN
    )
