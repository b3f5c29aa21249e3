"""`sluice`: the command line. Each command lives in a file of its own and is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.api import ManifestError

app = typer.Typer(
    help="Reinforcement-learning post-training for LLMs, on Kubernetes and on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Manifest = Annotated[Path, typer.Argument(help="RLJob manifest (YAML).", show_default=False)]
Manifests = Annotated[list[Path], typer.Argument(help="RLJob manifests (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a field: trainer.steps=10. May be repeated."),
]


def _refuse(error: ManifestError) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(2)


@app.command()
def run(
    manifest: Manifest,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives. Default: runs/<name>.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what an earlier run left there.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, also on a terminal.")] = False,
) -> None:
    """Run an RLJob on this machine. The same command again continues it."""
    from sluice.cli.run import run_here

    try:
        code = run_here(manifest, overrides or [], run_dir, fresh=fresh, plain=plain)
    except ManifestError as error:
        raise _refuse(error) from error
    raise typer.Exit(code)


@app.command()
def validate(manifests: Manifests, overrides: Overrides = None) -> None:
    """Check manifests: fields, types, rules and the files that they name."""
    from sluice.cli.validate import validate_file

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
    from sluice.cli.render import render_file

    try:
        typer.echo(render_file(manifest, overrides or []), nl=False)
    except ManifestError as error:
        raise _refuse(error) from error


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)]) -> None:
    """Write report.html for a run, finished or not."""
    from sluice.telemetry.report import write_report

    if not (run_dir / "metrics.jsonl").exists():
        typer.echo(f"error: {run_dir}: no metrics.jsonl there; expected the directory of a run", err=True)
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
    from sluice.cli.render import to_yaml

    typer.echo(to_yaml([custom_resource_definition()]), nl=False)
