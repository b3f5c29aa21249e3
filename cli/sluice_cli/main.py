"""`sluice`: the command line.

A command's module is imported when the command is called, since `sluice --help` must be quick.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sluice import __version__
from sluice_cli.command_groups import group, optional_group
from sluice_cli.entry import exit_on_interrupt
from sluice_cli.exits import Exit
from sluice_cli.explain import explain_commands
from sluice_cli.options import (
    ContainerEngine,
    Manifest,
    Manifests,
    Output,
    Overrides,
    examples,
    manifest_errors,
    say,
)
from sluice_cli.output import Format
from sluice_cli.status import commands as status_commands

_SUMMARY = "Reinforcement-learning post-training of LLMs, on Kubernetes or on this machine."

app = typer.Typer(help=_SUMMARY, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        say(__version__)
        raise typer.Exit(Exit.DONE)


@app.callback(help=_SUMMARY)
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@app.command(
    epilog=examples(
        "sluice init digits --yes && cd digits && sluice run job.yaml",
        "sluice init capitals --data capitals.jsonl --model ~/models/Qwen3-0.6B --gpus 2",
    )
)
def init(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="New directory for the files. Default: sluice asks.", show_default=False
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face checkpoint. Default: a tiny model with random weights."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prompts (.jsonl, .json, .parquet). Default: sample rows."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="Number of GPUs for the job. Default: 0.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 100,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train an adapter of --model instead of all weights.")
    ] = False,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Learn from pairs of a chosen and a rejected answer (DPO), without a reward.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask no questions; use the defaults.")
    ] = False,
) -> None:
    """Create the files of a new task: manifest, reward function and data."""
    with manifest_errors():
        from sluice_cli.init.command import TaskOptions, write_task

        if not yes and sys.stdin.isatty():
            directory = directory or Path(typer.prompt("Directory of the task", default="task"))
            model = model or _prompt_path("Model (Hugging Face directory; empty: a tiny model)")
            data = data or _prompt_path("Prompts (.jsonl, .json, .parquet; empty: sample rows)")
            gpus = typer.prompt("GPUs", default=0, type=int) if gpus is None else gpus
        target = directory or Path("task")
        options = TaskOptions(target, model, data, gpus or 0, steps, lora=lora, pairs=pairs)
        for file in write_task(options):
            say(str(file))
    say(f"next: sluice validate {target}/job.yaml --deep; sluice run {target}/job.yaml")


def _prompt_path(question: str) -> Path | None:
    answer = typer.prompt(question, default="", show_default=False)
    return Path(answer).expanduser() if answer else None


@app.command(
    epilog=examples(
        "sluice run job.yaml",
        "sluice run job.yaml --set trainer.steps=500   # continue the run for more steps",
        "sluice run job.yaml --from runs/first --run-dir runs/second",
    )
)
def run(
    manifest: Manifest,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run. Default: runs/NAME.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the earlier run in the run directory.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print plain lines, also on a terminal.")
    ] = False,
    train_from: Annotated[
        Path | None,
        typer.Option(help="Train on the rollouts dumped in this directory, without engines."),
    ] = None,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Generate and score samples; do not train.")
    ] = False,
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Start with the model of another run: its directory or its name.",
        ),
    ] = None,
    containers: Annotated[
        ContainerEngine | None,
        typer.Option(help="Run programs in containers of their rollout.environment.image."),
    ] = None,
) -> None:
    """Run a job on this machine, or continue it.

    The same command continues a run that was stopped. With --set it continues with a changed
    manifest, if the change is safe.
    """
    with manifest_errors(), exit_on_interrupt():
        from sluice_cli.run.command import quiet_interrupts, run_local
        from sluice_cli.run.start_from import model_of
    with quiet_interrupts(), manifest_errors():
        changes = list(overrides or [])
        if train_from is not None:
            changes += [f"debug.replay={train_from.resolve()}", "rollout.replicas=0"]
        if rollout_only:
            changes.append("debug.rolloutOnly=true")
        if start_from is not None:
            changes += model_of(start_from)
        code = run_local(
            manifest, changes, run_dir, fresh=fresh, plain=plain, containers=containers
        )
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
        typer.Option("--deep", help="Also render ten prompts and compute rewards; print both."),
    ] = False,
    output: Output = Format.TEXT,
) -> None:
    """Check manifests of jobs and pools, and the data, models and functions that they name.

    User functions are imported, in a separate process.
    """
    from sluice_cli.validate.command import validate_all

    valid = validate_all(files, overrides or [], deep=deep, form=output)
    raise typer.Exit(Exit.DONE if valid else Exit.INVALID)


@app.command(epilog=examples("sluice render job.yaml | kubectl diff -f -"))
def render(manifest: Manifest, overrides: Overrides = None) -> None:
    """Print the Kubernetes objects of a job, or of a pool of engines."""
    with manifest_errors():
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
        bool, typer.Option("--in-place", help="Rewrite the file instead of printing the result.")
    ] = False,
) -> None:
    """Rewrite a manifest of an earlier version.

    Fields get their current names. Comments, order and other documents of the file stay.
    """
    with manifest_errors():
        from sluice_cli.migrate_manifest import migrate_file

        say(migrate_file(file, in_place=in_place))


status_commands.register(app)
explain_commands.register(app)
for name, module, summary in (
    ("convert", "convert", "Convert checkpoints from and to the Hugging Face format."),
    ("data", "data.commands", "Inspect, convert, split and create prompt files."),
    ("models", "models.commands", "Fetch models and data by URI; list and remove them."),
    ("pool", "pool.commands", "Run engines on this machine that several jobs share."),
):
    app.add_typer(group(f"sluice_cli.{module}", summary), name=name)
app.add_typer(
    optional_group(
        "import", "sluice-rl-migrate", "Convert launch scripts of slime and verl to RLJobs."
    ),
    name="import",
)
