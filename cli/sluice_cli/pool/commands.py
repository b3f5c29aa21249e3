"""`sluice pool`: start, list and end pools of engines on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice_cli.entry import exit_on_interrupt
from sluice_cli.options import Output, Overrides, examples, manifest_errors, say
from sluice_cli.output import Format

app = typer.Typer(help="Run engines on this machine that several jobs share.", no_args_is_help=True)


@app.command(
    epilog=examples(
        "sluice pool up pool.yaml",
        "sluice run job.yaml --set rollout.pool=shared   # in another terminal",
    )
)
def up(
    manifest: Annotated[
        Path, typer.Argument(help="RLEnginePool manifest (YAML).", show_default=False)
    ],
    overrides: Overrides = None,
) -> None:
    """Start the engines of a pool and keep them running, until Ctrl-C.

    Jobs with rollout.pool use them. An engine that dies is started again.
    """
    with manifest_errors(), exit_on_interrupt():
        from sluice_cli.pool.up import run_pool
    with manifest_errors():
        raise typer.Exit(run_pool(manifest, overrides or []))


@app.command(name="list", epilog=examples("sluice pool list", "sluice pool list -o json"))
def list_pools(output: Output = Format.TEXT) -> None:
    """List the pools that run on this machine."""
    from sluice_cli.pool.listing import list_text

    say(list_text(output))


@app.command(epilog=examples("sluice pool down shared"))
def down(name: Annotated[str, typer.Argument(help="Name of the pool.")]) -> None:
    """End a pool of this machine, and wait until its engines have ended."""
    with manifest_errors():
        from sluice_cli.pool.down import end_pool

        say(end_pool(name))
