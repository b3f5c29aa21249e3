"""`sluice import`: converts a launch script or a configuration of slime or verl to a manifest.

Scripts are not executed, except with `--exact`, in a sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice_migrate.bash.lexer import ScriptError
from sluice_migrate.draft import Draft, ImportFailedError, job_name

# Exit codes of `sluice`: the job is not valid yet; the input cannot be read.
_FAILED, _INVALID = 1, 2

app = typer.Typer(help="RLJob manifests of other projects' launch scripts.", no_args_is_help=True)
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="File to write. Default: standard output.")
]
DraftName = Annotated[str | None, typer.Option(help="Name of the job. Default: from the script.")]
Variables = Annotated[
    list[str] | None,
    typer.Option("--var", metavar="NAME=VALUE", help="Set a variable that the script expects."),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Run the script with bash in a sandbox that only records the programs it starts.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print manifest and notes as one JSON object.")
]


@app.command()
def slime(
    script: Annotated[
        Path, typer.Argument(help="Launch script, such as run-qwen3-4B.sh.", show_default=False)
    ],
    out: Out = None,
    name: DraftName = None,
    variables: Variables = None,
    exact: Exact = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert a script that starts slime's train.py or train_async.py."""

    def draft() -> Draft:
        from sluice_migrate.bash.reading import read
        from sluice_migrate.slime.importer import import_slime

        parsed = read(_read(script), script, _environment(variables), exact=exact)
        return import_slime(parsed, str(script))

    _import(script.name, draft, out, name, force, as_json)


@app.command()
def verl(
    source: Annotated[
        str,
        typer.Argument(
            help="Script, Hydra YAML, or 'python -m verl.trainer.main_ppo ...'.", show_default=False
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(help="The YAML file that --config-name of the command names.")
    ] = None,
    out: Out = None,
    name: DraftName = None,
    variables: Variables = None,
    exact: Exact = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert a script, a command or a configuration of verl's trainers."""

    def draft() -> Draft:
        from sluice_migrate.bash.reading import read
        from sluice_migrate.verl.hydra import from_yaml
        from sluice_migrate.verl.importer import import_command, import_verl

        base = from_yaml(_read(config), str(config)) if config else {}
        if re.search(r"\.ya?ml$", source) and "=" not in source:
            return import_verl(base | from_yaml(_read(Path(source)), source), source)
        path = _file(source)
        text = source if path is None else _read(path)
        parsed = read(text, path, _environment(variables), exact=exact)
        return import_command(parsed, "verl" if path is None else source, base)

    _import(_shown(source), draft, out, name, force, as_json)


def _file(source: str) -> Path | None:
    """Return the path of a file; None for a command line, which has a blank or an override."""
    is_file = len(source) < 4096 and "\n" not in source and Path(source).is_file()
    return Path(source) if is_file or not re.search(r"[\s=]", source) else None


def _shown(source: str) -> str:
    """Name the source for the manifest: its file, or a command line."""
    return Path(source).name if " " not in source else "a command line of verl"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ImportFailedError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ImportFailedError(
            f"{path}: not a text file: {error.reason} at byte {error.start}"
        ) from error


def _environment(variables: list[str] | None) -> dict[str, str]:
    environment = {}
    for text in variables or []:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ImportFailedError(f"--var {text}: expected NAME=VALUE")
        environment[name] = value
    return environment


def _import(
    source: str,
    make: Callable[[], Draft],
    out: Path | None,
    name: str | None,
    force: bool,
    as_json: bool,
) -> None:
    from sluice_migrate.manifest import drop_refused_fields, to_text

    try:
        if out and out.exists() and not force:
            raise ImportFailedError(f"{out}: the file exists; overwrite it with --force")
        draft = make()
        if name:
            draft.name = job_name(name)
    except (ImportFailedError, ScriptError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_INVALID) from error
    problem = drop_refused_fields(draft)
    text = to_text(draft, source)
    if as_json:
        notes = [
            {"kind": n.kind, "subject": n.subject, "line": n.line, "text": n.text}
            for n in draft.notes
        ]
        text = (
            json.dumps({"manifest": text, "notes": notes, "problem": problem}, ensure_ascii=False)
            + "\n"
        )
    if out:
        out.write_text(text)
    else:
        typer.echo(text, nl=False)
    _report(draft)
    if problem:
        typer.echo(f"error: the job is not valid yet:\n{problem}", err=True)
        raise typer.Exit(_FAILED)


def _report(draft: Draft) -> None:
    if not draft.notes:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("", "line", "what", "why"):
        table.add_column(heading, overflow="fold", style="bold" if not heading else "")
    order = ("not translated", "check", "other default")
    for note in sorted(draft.notes, key=lambda note: order.index(note.kind)):
        table.add_row(note.kind, str(note.line or ""), escape(note.subject), escape(note.text))
    Console(stderr=True, highlight=False).print(table)
