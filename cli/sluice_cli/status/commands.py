"""Commands that look at jobs: list, status, logs, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice_cli.exits import Exit
from sluice_cli.options import JobName, Namespace, Output, RunDir, examples, reading, say
from sluice_cli.output import Format


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


def list_jobs(
    namespace: Namespace = None,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Directory of this machine's runs.")] = Path("runs"),
    output: Output = Format.TEXT,
) -> None:
    """List runs of this machine and, where a cluster is configured, its jobs."""
    with reading():
        from sluice_cli.status.listing import list_text

        say(list_text(runs, namespace, everywhere=everywhere, form=output))


def status(
    name: JobName = None,
    namespace: Namespace = None,
    run_dir: RunDir = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Until the job has ended.")] = False,
    output: Output = Format.TEXT,
) -> None:
    """Show what a job does, waits for and last failed of, in a cluster or on this machine."""
    with reading():
        from sluice_cli.status.status import print_status

        print_status(name, namespace, run_dir, watch=watch, form=output)


def logs(
    name: JobName = None,
    role: Annotated[
        str | None, typer.Argument(help="trainer, rollout, buffer or rendezvous. Default: all.")
    ] = None,
    namespace: Namespace = None,
    run_dir: RunDir = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Until the job has ended, with later pods.")
    ] = False,
    replica: Annotated[int | None, typer.Option(help="Of this replica of the role only.")] = None,
    container: Annotated[
        str | None, typer.Option("--container", "-c", help="Of this container only.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Of this attempt only; a cluster keeps the present one.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=0, help="The last lines of each log. Default: all.")
    ] = None,
) -> None:
    """Print the logs of a job's pods as one, in the order of time."""
    from sluice.api.status import ROLES

    if role is not None and role not in ROLES:
        typer.echo(f"error: there is no role {role}; expected one of {', '.join(ROLES)}", err=True)
        raise typer.Exit(Exit.INVALID)
    if name in ROLES and role is None and run_dir is not None:  # a run directory needs no name
        name, role = None, name
    with reading():
        from sluice_cli.status.logs import LogFilter, print_logs

        print_logs(
            name,
            namespace,
            run_dir,
            LogFilter(role, replica, container, attempt, tail),
            follow=follow,
        )


def report(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
) -> None:
    """Write report.html for a run, finished or not."""
    from sluice.telemetry.report import write_report

    if not (run_dir / "metrics.jsonl").exists():
        typer.echo(
            f"error: {run_dir}: no metrics.jsonl there; expected the directory of a run", err=True
        )
        raise typer.Exit(Exit.INVALID)
    typer.echo(write_report(run_dir, run_dir.name))
