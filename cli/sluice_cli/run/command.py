"""`sluice run`: reconcile a job on a LocalCluster, and show its progress."""

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
from sluice.stores.cache import hold
from sluice.telemetry import health, run_directory
from sluice.telemetry.run_warnings import RunWarning
from sluice.wire.tls import PLAIN, Tls
from sluice.wire.v1.buffer_pb2 import BufferStats
from sluice.wire.v1.rendezvous_pb2 import Ledger
from sluice_cli.exits import Exit
from sluice_cli.models.fetching import Local, local, write_versions
from sluice_cli.run import containers as images
from sluice_cli.run.checkpoint_store import check_store
from sluice_cli.run.ending import finish, write_summary
from sluice_cli.run.monitor import Monitor, ServiceSnapshot
from sluice_cli.run.run_files import RunFiles
from sluice_cli.run.view import LiveView, PlainView, View
from sluice_cli.validate import file_checks, footprint
from sluice_cli.validate.missing_files import check_files
from sluice_client.resolve import resolve
from sluice_client.resume_changes import LENGTH_FIELDS, change_notes
from sluice_client.run_dir import locked, prepare
from sluice_client.runs import RUNS
from sluice_operator.cluster.local import gpus, pools, run_state
from sluice_operator.cluster.local.cluster import LocalCluster
from sluice_operator.plan import Observed, Plan, Progress
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests.objects import rendezvous_address
from sluice_operator.plan.manifests.render import render_all
from sluice_operator.progress import progress_of
from sluice_operator.reconcile import cancelled_by_signals, run_job

REFRESH_SECONDS = 0.5
# Rows of each prompt file that are checked before the run starts; the buffer checks all rows.
CHECKED_ROWS = 1000
# Conditions that end a run but do not keep it from going on. A failed run is always tried again,
# and a run that has succeeded goes on only if it has become longer.
RETRIED: tuple[ConditionType, ...] = ("Failed",)
RETRIED_IF_LONGER: tuple[ConditionType, ...] = ("Failed", "Succeeded")

ALREADY_SUCCEEDED = (
    "this run has already succeeded, so nothing is left to train; to train longer, raise "
    "trainer.steps; to start over, use --fresh, which deletes the run"
)


def run_local(
    path: Path,
    overrides: list[str],
    run_dir: Path | None,
    *,
    fresh: bool,
    plain: bool,
    containers: str | None = None,
) -> int:
    """Run or continue a job on this machine.

    Parameters
    ----------
    path
        The manifest.
    overrides
        Fields to set, as `PATH=VALUE`.
    run_dir
        Directory of the run. Default: `runs/NAME`.
    fresh
        Delete an earlier run in this directory.
    plain
        Print lines, also on a terminal.
    containers
        `podman` or `docker`, for programs that have an image.

    Returns
    -------
    The exit code: 0 if the job succeeded, 1 if it failed, 130 if the user stopped it.

    Raises
    ------
    ManifestError
        If the job is not valid or cannot run on this machine. Nothing was started.

    """
    # Quick checks come first; everything up to the lock can fail without a trace on the disk.
    job = resolve(load_job(path, overrides), path.resolve().parent)
    directory = (run_dir or RUNS / job.metadata.name).resolve()
    here = local(job, None if fresh else directory)
    with hold(*here.fetched.values()):
        return _run_here(here, directory, fresh=fresh, plain=plain, containers=containers)


def _run_here(
    here: Local[RLJob], directory: Path, *, fresh: bool, plain: bool, containers: str | None
) -> int:
    """Run a job whose files are on this machine; return the exit code."""
    job = here.job
    check_files(job)
    file_checks.check_contents(job, rows=CHECKED_ROWS).raise_problems()
    check_pool(job)
    check_gpus(job)
    if problem := footprint.shortage(job):
        raise ManifestError(problem)
    check_engine(job)
    check_store(job)
    images.check(job, containers)
    with run_dir_errors(directory), locked(directory) as lock, pools.membership(job):
        prepared = prepare(directory, job, fresh=fresh)
        write_versions(directory, here.fetched)
        longer = any(change.path in LENGTH_FIELDS for change in prepared.changed)
        notes = [*change_notes(prepared.changed, job), *images.notes(job, containers)]
        if prepared.succeeded and not longer:
            notes.append(ALREADY_SUCCEEDED)
        console = Console()
        for note in notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        view = view_of(console, job, directory, plain=plain)
        reopen = RETRIED_IF_LONGER if longer else RETRIED
        try:
            status = asyncio.run(_run(job, directory, view, reopen, containers, lock))
        except OSError as error:
            raise ManifestError(
                f"{directory}: the run cannot go on: {error}; once this is fixed, the same command "
                "continues it"
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
def run_dir_errors(directory: Path) -> Iterator[None]:
    """Raise ManifestError if the run directory cannot be used."""
    try:
        yield
    except run_state.RunDirectoryError as error:
        raise ManifestError(str(error)) from error
    except OSError as error:
        raise ManifestError(f"--run-dir {directory}: {error.strerror or error}") from error


def view_of(console: Console, job: RLJob, directory: Path, *, plain: bool) -> View:
    """Return a live view on a terminal, else a view that prints lines."""
    if plain or not console.is_terminal:
        console.print(f"run: {directory}", markup=False, highlight=False, soft_wrap=True)
        return PlainView(console)
    return LiveView(console, job, directory)


def check_pool(job: RLJob) -> None:
    """Raise ManifestError if the job names a pool that does not run here or does not fit."""
    pool = pools.facts(job)
    if pool and pool.problem:
        raise ManifestError(pool.problem)


def check_gpus(job: RLJob) -> None:
    """Raise ManifestError if this machine has fewer GPUs than the trainer and one engine need."""
    needed, visible = gpus.required_by(render_all(job)), len(gpus.visible_gpus())
    if needed > visible:
        raise ManifestError(
            f"the trainer and one engine need {needed} GPU(s), and this machine shows {visible} "
            "(CUDA_VISIBLE_DEVICES); "
            "to run on CPUs set spec.trainer.gpusPerNode: 0 and spec.rollout.gpusPerReplica: 0"
        )


def check_engine(job: RLJob) -> None:
    """Raise ManifestError if the engine that the job starts is not installed."""
    containers = (
        container
        for document in render_all(job)
        if document["kind"] == "Pod"
        for container in document["spec"]["containers"]
    )
    if any(container["name"] == "engine" for container in containers) and (
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
    """Reconcile the job until it ends; return its status, or None if the user stopped it.

    Parameters
    ----------
    job, directory, view
        The job, its run directory and its output.
    reopen
        Conditions that may be taken back: a job that ended with one of them goes on.
    containers
        Container engine for programs that have an image.
    lock
        File descriptor of the directory's lock.

    """
    started = time.monotonic()
    monitor, files = Monitor(directory / run_directory.TIMELINE), RunFiles(directory)
    # Steps of an earlier start are read now, so that their warnings are not printed again.
    warnings = HealthWarnings(
        health.HealthMonitor(files.read()), health.StallMonitor(job.spec.rollout.batch_size)
    )
    status: RLJobStatus | None = None
    volumes = {"run": directory, "checkpoint": directory / "checkpoints"}
    variables = images.variables(containers)
    async with LocalCluster(directory, volumes=volumes, env=variables, lock=lock) as cluster:

        async def probe() -> Progress | None:
            # The Service and the token exist only after the first reconcile.
            observed = await cluster.observe(job)
            address = rendezvous_address(job, observed)
            secret = observed.objects.get(("Secret", names.token_name(job)))
            if address is None or secret is None:
                return None
            snapshot = await monitor.take_snapshot(
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
                update_view(view, status, monitor.latest, files, warnings)
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
            # The last steps may have come after the last refresh.
            update_view(view, status, monitor.latest, files, warnings)
            await monitor.close()
    write_summary(
        directory,
        status,
        monitor,
        time.monotonic() - started,
        spec=job.spec,
        warnings=warnings.between_steps(),
    )
    return None if stopped else status


@dataclass(frozen=True, slots=True)
class HealthWarnings:
    """Warnings about an unhealthy run; each is given once."""

    steps: health.HealthMonitor
    harvest: health.StallMonitor

    def new(self, new_steps: list[dict[str, Any]], stats: BufferStats | None) -> Iterator[str]:
        """Yield the warnings that new steps and the buffer's statistics give rise to."""
        for warning in (warning for record in new_steps for warning in self.steps.see(record)):
            yield warning.sentence()
        if stats:
            counters = stats.counters
            fruitless = self.harvest.see(
                stats.step, int(counters["groups_failed"]), int(counters["groups_filtered"])
            )
            if fruitless:
                yield fruitless.sentence()

    def between_steps(self) -> list[RunWarning]:
        """Return the warnings that are not in the metrics of any step."""
        return [self.harvest.warning] if self.harvest.warning else []


def update_view(
    view: View,
    status: RLJobStatus | None,
    snapshot: ServiceSnapshot,
    files: RunFiles,
    warnings: HealthWarnings,
) -> None:
    """Show the present state of the run and its new warnings."""
    new_steps = files.read()
    view.show(status, snapshot, files, new_steps)
    for text in warnings.new(new_steps, snapshot.stats):
        view.event("Warning", text)


def tls_of(job: RLJob, observed: Observed) -> Tls:
    """Return the certificate authority and the name of this run's servers, if it uses TLS."""
    secret = observed.objects.get(("Secret", names.tls_name(job))) if job.spec.tls.enabled else None
    return (
        Tls(secret["stringData"][names.TLS_CA].encode(), names.tls_server_name(job))
        if secret
        else PLAIN
    )
