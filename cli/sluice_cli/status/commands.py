"""Options of the commands that show jobs: list, status, logs, report, track."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice_cli.exits import Exit
from sluice_cli.options import JobName, Namespace, Output, RunDir, examples, read_errors, say
from sluice_cli.output import Format
from sluice_client.runs import RUNS


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command(name="list", epilog=examples("sluice list", "sluice list -A -o json"))(list_jobs)
    app.command(epilog=examples("sluice status quickstart", "sluice status gsm8k -n team --watch"))(
        status
    )
    app.command(
        epilog=examples("sluice logs quickstart", "sluice logs gsm8k trainer -f --tail 100")
    )(logs)
    app.command(epilog=examples("sluice report runs/quickstart"))(report)
    app.command(
        epilog=examples(
            "sluice track runs/quickstart", "sluice track runs/quickstart --to mlflow --project rl"
        )
    )(track)


def list_jobs(
    namespace: Namespace = None,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs of all namespaces.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Directory that holds the runs.")] = RUNS,
    output: Output = Format.TEXT,
) -> None:
    """List runs of this machine and, if a cluster is configured, its jobs."""
    with read_errors():
        from sluice_cli.status.listing import list_text

        say(list_text(runs, namespace, everywhere=everywhere, form=output))


def status(
    name: JobName = None,
    namespace: Namespace = None,
    run_dir: RunDir = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update until the job has ended.")
    ] = False,
    output: Output = Format.TEXT,
) -> None:
    """Show a job's state, progress and last failure.

    Also shows what the job waits for, and what to do about the failure.
    """
    with read_errors():
        from sluice_cli.status.status import print_status

        print_status(name, namespace, run_dir, watch=watch, form=output)


def logs(
    name: JobName = None,
    role: Annotated[
        str | None,
        typer.Argument(help="Role: trainer, rollout, buffer or rendezvous. Default: all."),
    ] = None,
    namespace: Namespace = None,
    run_dir: RunDir = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print new lines, of new pods too, until the end."),
    ] = False,
    replica: Annotated[int | None, typer.Option(help="Show only this replica.")] = None,
    container: Annotated[
        str | None, typer.Option("--container", "-c", help="Show only this container.")
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(help="Show only this attempt. A cluster keeps only the newest one."),
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Show the last lines of each log. Default: all.")
    ] = None,
) -> None:
    """Print the logs of a job's pods, merged by time."""
    from sluice.api.status import ROLES

    if role is not None and role not in ROLES:
        typer.echo(f"error: there is no role {role}; expected one of {', '.join(ROLES)}", err=True)
        raise typer.Exit(Exit.INVALID)
    if name in ROLES and role is None and run_dir is not None:  # a run directory needs no name
        name, role = None, name
    with read_errors():
        from sluice_cli.status.logs import LogFilter, print_logs

        selected = LogFilter(role, replica, container, attempt, tail)
        print_logs(name, namespace, run_dir, selected, follow=follow)


def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
) -> None:
    """Write report.html into a run directory. The run may still go on."""
    from sluice.telemetry.report import write_report

    if not (run_dir / "metrics.jsonl").exists():
        typer.echo(
            f"error: {run_dir} has no metrics.jsonl; expected the directory of a run", err=True
        )
        raise typer.Exit(Exit.INVALID)
    typer.echo(write_report(run_dir, run_dir.name))


def track(
    run_dir: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    to: Annotated[
        Literal["wandb", "mlflow", "trackio", "swanlab"] | None,
        typer.Option(help="Tracker. Default: those of the job (telemetry.trackers)."),
    ] = None,
    project: Annotated[str | None, typer.Option(help="Project of --to. Default: sluice.")] = None,
) -> None:
    """Send what trackers such as W&B do not have of a run yet, also long after its end."""
    with read_errors():
        from sluice_cli.status.track import track

        track(run_dir, to, project)
