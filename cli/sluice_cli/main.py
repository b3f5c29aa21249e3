"""`sluice`: the command line.

Each command lives in a file of its own and is imported when it is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sluice.api import ManifestError
from sluice_cli import convert, data, import_

app = typer.Typer(
    help="Reinforcement-learning post-training for LLMs, on Kubernetes and on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(convert.app, name="convert")
app.add_typer(data.app, name="data")
app.add_typer(import_.app, name="import")
Manifest = Annotated[Path, typer.Argument(help="RLJob manifest (YAML).", show_default=False)]
Manifests = Annotated[
    list[Path], typer.Argument(help="RLJob manifests (YAML).", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a field: trainer.steps=10. May be repeated."
    ),
]


def _refuse(error: ManifestError) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(2)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Why a job cannot be read, as one line. The libraries for it come with an extra."""
    try:
        from sluice_operator.cluster.view import ReadError

        try:
            yield
        except ReadError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        text = (
            f"reading a job needs the extra `operator` ({error.name} is missing): pip install "
            "'sluice[operator]'"
        )
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(1) from error


@app.command()
def run(
    manifest: Manifest,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run lives. Default: runs/<name>.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete what an earlier run left there.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain lines, also on a terminal.")
    ] = False,
    train_from: Annotated[
        Path | None,
        typer.Option(
            help="Train on the rollouts that an earlier run dumped there, without engines."
        ),
    ] = None,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Generate, score and record; train nothing.")
    ] = False,
) -> None:
    """Run an RLJob on this machine. The same command again continues it."""
    from sluice_cli.run import run_here

    changes = list(overrides or [])
    if train_from is not None:
        changes += [f"debug.replay={train_from.resolve()}", "rollout.replicas=0"]
    if rollout_only:
        changes.append("debug.rolloutOnly=true")
    try:
        code = run_here(manifest, changes, run_dir, fresh=fresh, plain=plain)
    except ManifestError as error:
        raise _refuse(error) from error
    raise typer.Exit(code)


@app.command()
def validate(manifests: Manifests, overrides: Overrides = None) -> None:
    """Check manifests: fields, types, rules and the files that they name."""
    from sluice_cli.validate import validate_file

    failed = False
    for path in manifests:
        try:
            typer.echo(validate_file(path, overrides or []))
        except ManifestError as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
    raise typer.Exit(2 if failed else 0)


@app.command()
def render(manifest: Manifest, overrides: Overrides = None) -> None:
    """Print the Kubernetes objects that a job starts with."""
    from sluice_cli.render import render_file

    try:
        typer.echo(render_file(manifest, overrides or []), nl=False)
    except ManifestError as error:
        raise _refuse(error) from error


JobName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The job's name.", show_default=False)
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Default: that of the kubeconfig's context.")
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        help="A run of this machine. Default: runs/NAME, if there is one and no -n is given."
    ),
]


@app.command()
def status(
    name: JobName = None,
    namespace: Namespace = None,
    run_dir: RunDir = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Until the job has ended.")] = False,
) -> None:
    """Show what a job does, waits for and last failed of, in a cluster or on this machine."""
    with _reading():
        from sluice_cli.status import print_status

        print_status(name, namespace, run_dir, watch=watch)


@app.command()
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
        raise typer.Exit(2)
    if name in ROLES and role is None and run_dir is not None:  # a run directory needs no name
        name, role = None, name
    with _reading():
        from sluice_cli.logs import Wanted, print_logs

        print_logs(
            name, namespace, run_dir, Wanted(role, replica, container, attempt, tail), follow=follow
        )


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
) -> None:
    """Write report.html for a run, finished or not."""
    from sluice.telemetry.report import write_report

    if not (run_dir / "metrics.jsonl").exists():
        typer.echo(
            f"error: {run_dir}: no metrics.jsonl there; expected the directory of a run", err=True
        )
        raise typer.Exit(2)
    typer.echo(write_report(run_dir, run_dir.name))


@app.command(hidden=True)
def reference() -> None:
    """Print the API reference as Markdown."""
    from sluice.api.reference import reference as text

    typer.echo(text(), nl=False)


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition of RLJob."""
    from sluice.api.crd import custom_resource_definition
    from sluice_cli.render import to_yaml

    typer.echo(to_yaml([custom_resource_definition()]), nl=False)
