"""`sluice`: the command line.

Each command lives in a file of its own and is imported when it is called.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sluice import __version__
from sluice_cli.entry import nothing_begun
from sluice_cli.exits import Exit
from sluice_cli.explain import explain_commands
from sluice_cli.lazy import group, optional_group
from sluice_cli.options import (
    ContainerEngine,
    Manifest,
    Manifests,
    Output,
    Overrides,
    examples,
    manifests,
    say,
)
from sluice_cli.output import Format
from sluice_cli.status import commands

app = typer.Typer(
    help="Reinforcement-learning post-training for LLMs, on Kubernetes and on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        say(__version__)
        raise typer.Exit(Exit.DONE)


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Reinforcement-learning post-training for LLMs, on Kubernetes and on this machine."""


@app.command(
    epilog=examples(
        "sluice init digits --yes && cd digits && sluice run job.yaml",
        "sluice init capitals --data capitals.jsonl --model ~/models/Qwen3-0.6B --gpus 2",
    )
)
def init(
    directory: Annotated[
        Path | None,
        typer.Argument(help="A new directory for the files. Default: asked.", show_default=False),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Your Hugging Face checkpoint. Default: a tiny model, random weights."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Your prompts (.jsonl, .json, .parquet). Default: a sample."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of this machine for the job. Default: 0.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take defaults.")] = False,
) -> None:
    """Write the files of a new task: manifest, reward function, data sample."""
    with manifests():
        from sluice_cli.init.command import Wishes, write_task

        if not yes and sys.stdin.isatty():
            directory = directory or Path(typer.prompt("Directory of the task", default="task"))
            model = model or _asked("Model (Hugging Face directory; empty: a tiny one)")
            data = data or _asked("Prompts (.jsonl, .json, .parquet; empty: a sample)")
            gpus = typer.prompt("GPUs", default=0, type=int) if gpus is None else gpus
        where = directory or Path("task")
        for file in write_task(Wishes(where, model, data, gpus or 0, steps)):
            say(str(file))
    say(f"next: sluice validate {where}/job.yaml --deep; sluice run {where}/job.yaml")


def _asked(question: str) -> Path | None:
    answer = typer.prompt(question, default="", show_default=False)
    return Path(answer).expanduser() if answer else None


@app.command(
    epilog=examples(
        "sluice run job.yaml",
        "sluice run job.yaml --set trainer.steps=500   # longer: a run of job.yaml goes on",
        "sluice run job.yaml --from runs/first --run-dir runs/second",
    )
)
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
    begin_with: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Start anew with the model of another run: its directory, or its name below "
            "runs/.",
        ),
    ] = None,
    containers: Annotated[
        ContainerEngine | None,
        typer.Option(
            help="Run programs that have an image (rollout.environment.image) in containers of "
            "it, not as processes."
        ),
    ] = None,
) -> None:
    """Run an RLJob on this machine. The same command again continues it; with --set it goes on
    changed, where that is safe.
    """
    with manifests(), nothing_begun():
        from sluice_cli.run.command import quiet_interrupts, run_here
        from sluice_cli.run.start_from import model_of
    with quiet_interrupts(), manifests():
        changes = list(overrides or [])
        if train_from is not None:
            changes += [f"debug.replay={train_from.resolve()}", "rollout.replicas=0"]
        if rollout_only:
            changes.append("debug.rolloutOnly=true")
        if begin_with is not None:
            changes += model_of(begin_with)
        code = run_here(manifest, changes, run_dir, fresh=fresh, plain=plain, containers=containers)
    raise typer.Exit(code)


@app.command(
    epilog=examples(
        "sluice validate job.yaml",
        "sluice validate job.yaml --deep",
        "sluice validate jobs/*.yaml -o json",
    )
)
def validate(
    files: Manifests,
    overrides: Overrides = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also render ten prompts and call each reward, and print both."
        ),
    ] = False,
    output: Output = Format.TEXT,
) -> None:
    """Check manifests and the files that they name: fields, rules, rows, models, functions.

    User functions are imported, in a process of their own.
    """
    from sluice_cli.validate.command import validate_all

    valid = validate_all(files, overrides or [], thoroughly=deep, form=output)
    raise typer.Exit(Exit.DONE if valid else Exit.INVALID)


@app.command(epilog=examples("sluice render job.yaml | kubectl diff -f -"))
def render(manifest: Manifest, overrides: Overrides = None) -> None:
    """Print the Kubernetes objects that a job starts with."""
    with manifests():
        from sluice_cli.render import render_file

        objects, warnings = render_file(manifest, overrides or [])
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    say(objects)


@app.command(
    epilog=examples(
        "sluice migrate-manifest job.yaml | diff job.yaml -",
        "sluice migrate-manifest job.yaml --in-place",
    )
)
def migrate_manifest(
    file: Manifest,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Rewrite the file instead of printing it.")
    ] = False,
) -> None:
    """Rewrite a manifest of an earlier version with the present names of fields.

    Comments, order and other documents of the file stay as they are.
    """
    with manifests():
        from sluice_cli.migrate_manifest import migrate_file

        say(migrate_file(file, in_place=in_place))


commands.register(app)
explain_commands.register(app)
for name, module, words in (
    ("convert", "convert", "Checkpoints between Hugging Face's and other formats."),
    ("data", "data.commands", "Look at prompt files, convert and split them."),
):
    app.add_typer(group(f"sluice_cli.{module}", words), name=name)
app.add_typer(
    optional_group(
        "import", "sluice-rl-migrate", "RLJob manifests of other projects' launch scripts."
    ),
    name="import",
)
