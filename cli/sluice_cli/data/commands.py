"""`sluice data`: inspect prompt files and make other prompt files from them.

Commands read and write row by row, so a file may be larger than the memory.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from sluice.api.groups.data import ImageLimits, PromptSource
from sluice.data.answers import Encoded, cut, parse_answer
from sluice.data.files import LocatedRow, Row, read_source
from sluice.data.make import made_rows
from sluice.data.preferences import parse_pair
from sluice.data.rows import RowError, prompt_reader
from sluice.data.transform import Shape, chosen, to_slime, to_verl, with_uid
from sluice.data.writers import Writer
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.exits import Exit
from sluice_cli.option_groups import option_groups
from sluice_cli.options import missing_library

app = typer.Typer(help="Inspect, convert, split and create prompt files.", no_args_is_help=True)
InputFile = Annotated[
    str,
    typer.Argument(
        metavar="IN",
        help="File or directory (.jsonl, .json, .parquet, Harbor tasks), or a slice: file@[0:100].",
        show_default=False,
    ),
]
OutputFile = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="File to write: .jsonl, .json or .parquet.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MaxRows = Annotated[
    int | None,
    typer.Option(min=1, help="Stop after this many rows. Required if the rows never end."),
]


@dataclass(frozen=True, slots=True)
class Columns:
    """Options that name the columns of a prompt file."""

    prompt_key: Annotated[
        str | None, typer.Option(help="Column of the prompt. Default: prompt, else input.")
    ] = None
    label_key: Annotated[
        str | None,
        typer.Option(help="Column of the label. Default: label, else verl's ground_truth."),
    ] = None
    metadata_key: Annotated[str, typer.Option(help="Column of the metadata.")] = "metadata"
    tools_key: Annotated[str, typer.Option(help="Column of the tools.")] = "tools"
    images_key: Annotated[str, typer.Option(help="Column of the images.")] = "images"

    def source(self, path: str) -> PromptSource:
        """Describe a prompt file as a manifest does."""
        try:
            return PromptSource(
                path=path,
                prompt_key=self.prompt_key,
                label_key=self.label_key,
                metadata_key=self.metadata_key,
                tools_key=self.tools_key,
                images_key=self.images_key,
            )
        except ValidationError as error:
            raise ConfigurationError(f"{path!r}: expected the path of a prompt file") from error


@dataclass(frozen=True, slots=True)
class Writing:
    """Options of the commands that write files."""

    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False
    as_json: AsJson = False

    def write(self, target: Path, rows: Iterable[Row]) -> None:
        """Write rows into a file and report their number."""
        with Writer(target, force=self.force) as writer:
            for row in rows:
                writer.write(row)
        self.report({"rows": writer.rows, "file": str(target)}, f"{target}: {writer.rows} rows")

    def report(self, facts: dict[str, Any], text: str) -> None:
        typer.echo(json.dumps(facts, ensure_ascii=False) if self.as_json else text)


@contextlib.contextmanager
def _input_errors() -> Iterator[None]:
    """Print bad input, or a missing library, as one line and exit."""
    try:
        yield
    except ConfigurationError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(Exit.INVALID) from error
    except ModuleNotFoundError as error:
        raise missing_library(error) from error


def _changed(rows: Iterable[LocatedRow], change: Callable[[LocatedRow], Row]) -> Iterator[Row]:
    """Apply a change to rows. Raises ConfigurationError, with the row's place, for a RowError."""
    for located in rows:
        try:
            yield change(located)
        except RowError as error:
            raise ConfigurationError(f"{located.where}: {error}") from error


@app.command()
@option_groups
def inspect(
    source: InputFile,
    *,
    model: Annotated[
        Path | None,
        typer.Option(help="Model directory: count tokens and apply its chat template."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Apply the chat template to text prompts (applyChatTemplate)."),
    ] = False,
    sft: Annotated[
        bool,
        typer.Option(
            "--sft", help="Read rows with given answers; with --model, mark the trained tokens."
        ),
    ] = False,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Read rows with a chosen and a rejected answer; with --model, mark the trained "
            "tokens.",
        ),
    ] = False,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Count prompts with more tokens. Needs --model.")
    ] = None,
    truncation: Annotated[
        Literal["left", "right"] | None,
        typer.Option(help="With --sft or --pairs: cut longer rows at this end (data.truncation)."),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode", help="Decode every image, not its header alone: finds those cut off."
        ),
    ] = False,
    columns: Columns,
    as_json: AsJson = False,
) -> None:
    """Show what a prompt file holds.

    The exit code is 1 if some rows are unusable.
    """
    from sluice_cli.data.inspection import ImageReader
    from sluice_cli.data.inspection import inspect as inspect_rows
    from sluice_cli.data.view import added_of, answers_of, lengths_of, print_inspection

    with _input_errors():
        if max_prompt_tokens and not model:
            raise ConfigurationError(
                "--max-prompt-tokens needs --model, whose tokenizer counts the tokens"
            )
        if sft and pairs:
            raise ConfigurationError("--sft and --pairs are for different rows: leave one out")
        if truncation and not (sft or pairs):
            raise ConfigurationError(
                "--truncation needs --sft or --pairs: only given answers are cut"
            )
        shorten, limits = _shortening(max_prompt_tokens, truncation), ImageLimits()
        with_images = partial(parse_answer, images=limits)
        answered = parse_pair if pairs else with_images if sft else None
        render, length = answers_of(model, chat, shorten) if answered else lengths_of(model, chat)
        # A text with images is a message, so it is always rendered.
        rendered = columns.source(source).model_copy(update={"apply_chat_template": True})
        inspection = inspect_rows(
            read_source(source),
            rendered,
            length,
            max_prompt_tokens,
            answered or prompt_reader(limits),
            None if pairs else ImageReader(limits, decode, added_of(model)),
        )
        if not inspection.rows:
            raise ConfigurationError(f"{source}: no rows")
        example = render(inspection.first) if inspection.first else None
    facts = {
        "source": source,
        "unit": "tokens" if model else "characters",
        "truncation": truncation,
        **inspection.summary(),
        "example": example,
    }
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        print_inspection(facts, inspection)
    raise typer.Exit(Exit.FAILED if inspection.broken else Exit.DONE)


def _shortening(
    longest: int | None, side: Literal["left", "right"] | None
) -> Callable[[Encoded], Encoded] | None:
    if side is None:
        return None
    if longest is None:
        raise ConfigurationError("--truncation needs --max-prompt-tokens: longer rows are cut")
    return partial(cut, longest=longest, side=side)


@app.command()
@option_groups
def convert(
    source: InputFile,
    target: OutputFile,
    *,
    to: Annotated[
        Shape | None, typer.Option(help="Use the columns of slime or verl. Default: no change.")
    ] = None,
    data_source: Annotated[
        str, typer.Option(help="With --to verl: data_source of rows without one.")
    ] = "unknown",
    columns: Columns,
    writing: Writing,
) -> None:
    """Convert a prompt file to another format, or to the columns of slime or verl."""
    with _input_errors():
        prompts = columns.source(source)
        changes: dict[Shape | None, Callable[[LocatedRow], Row]] = {
            None: lambda located: located.row,
            "slime": lambda located: to_slime(located.row, prompts),
            "verl": lambda located: to_verl(located.row, prompts, located.number, data_source),
        }
        writing.write(target, _changed(read_source(source), changes[to]))


@app.command()
@option_groups
def add_uid(source: InputFile, target: OutputFile, columns: Columns, writing: Writing) -> None:
    """Add a `uid`, the digest of prompt and label, to the metadata of every row.

    In verl's rows the metadata is the column extra_info.
    """
    with _input_errors():
        prompts = columns.source(source)
        seen: Counter[str] = Counter()
        rows = _changed(read_source(source), lambda located: with_uid(located.row, prompts, seen))
        writing.write(target, rows)


@app.command()
@option_groups
def split(
    source: InputFile,
    *,
    train: Annotated[Path, typer.Option(help="File for the training rows.", show_default=False)],
    test: Annotated[Path, typer.Option(help="File for the held-out rows.", show_default=False)],
    test_rows: Annotated[
        float, typer.Option(help="Rows to hold out: a number, or a fraction below 1.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the random choice.")] = 42,
    writing: Writing,
) -> None:
    """Split a prompt file into a training file and a held-out file.

    The held-out rows are chosen at random; the same seed gives the same files. Both files keep the
    order of the rows.
    """
    with _input_errors():
        total = sum(1 for _ in read_source(source))
        held_out = round(test_rows * total) if test_rows < 1 else round(test_rows)
        if not 0 < held_out < total:
            raise ConfigurationError(
                f"--test-rows {test_rows:g}: {held_out} of {total} rows; both files need at least "
                "one row"
            )
        if train.resolve() == test.resolve():
            raise ConfigurationError(f"{train}: --train and --test name the same file")
        with (
            Writer(train, force=writing.force) as kept,
            Writer(test, force=writing.force) as held,
        ):
            picks = chosen(total, held_out, seed)
            for located, picked in zip(read_source(source), picks, strict=True):
                (held if picked else kept).write(located.row)
        facts = {
            "train": {"rows": kept.rows, "file": str(train)},
            "test": {"rows": held.rows, "file": str(test)},
        }
        writing.report(facts, f"{train}: {kept.rows} rows\n{test}: {held.rows} rows")


@app.command()
@option_groups
def materialise(
    function: Annotated[
        str,
        typer.Argument(
            help="A function that yields rows: package.module.name or path/file.py:name."
        ),
    ],
    target: OutputFile,
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="Pass an argument to it; VALUE is JSON or text. May be repeated.",
        ),
    ] = None,
    rows: MaxRows = None,
    writing: Writing,
) -> None:
    """Write the rows that your Python function yields to a prompt file.

    A job can call the function itself (`data.prompts[].source`). A file helps if several jobs share
    the rows, or if making them takes long.
    """
    with _input_errors():
        writing.write(target, _rows_of_function(function, _arguments(arguments or []), rows))


@app.command("from-verifiers")
@option_groups
def from_verifiers(
    name: Annotated[str, typer.Argument(help="Id of an installed taskset.")],
    target: OutputFile,
    *,
    python: Annotated[
        str | None, typer.Option(help="Interpreter that has verifiers. Default: this one.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="Set a field of its configuration; VALUE is JSON or text. May be repeated.",
        ),
    ] = None,
    rows: MaxRows = None,
    writing: Writing,
) -> None:
    """Write the tasks of a verifiers environment to a prompt file.

    A job runs them with `rollout.environment.verifiers` of the same name and arguments.
    """
    from sluice_cli.data.verifiers_rows import rows_of

    with _input_errors():
        writing.write(target, rows_of(name, _arguments(arguments or []), python, rows))


@app.command()
@option_groups
def seeds(
    target: OutputFile,
    *,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows, one for each seed.")],
    prompt: Annotated[
        str, typer.Option(help="Task text. The environment's first observation follows it.")
    ],
    first: Annotated[int, typer.Option(min=0, help="Seed of the first row.")] = 0,
    writing: Writing,
) -> None:
    """Write rows for an environment that makes its tasks from seeds.

    `rollout.environment.gym` and `openenv` reset the environment with `metadata.reset` of a row.
    For held-out rows use seeds that the training rows do not have.
    """
    with _input_errors():
        numbers = range(first, first + rows)
        seeded = ({"prompt": prompt, "metadata": {"reset": {"seed": n}}} for n in numbers)
        writing.write(target, seeded)


def _rows_of_function(function: str, arguments: dict[str, Any], rows: int | None) -> Iterator[Row]:
    """Yield the rows of a user function.

    Raises ConfigurationError, with the line of the user's code, for what the function raises.
    """
    count = 0
    try:
        for count, row in enumerate(made_rows(function, arguments, rows), start=1):  # noqa: B007
            yield row
    except ConfigurationError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = (
            f"{function} raised {type(error).__name__} after {count} rows "
            f"({place.filename}:{place.lineno}): {error}"
        )
        raise ConfigurationError(text) from error
    if not count:
        raise ConfigurationError(f"{function} yielded no rows")


def _arguments(texts: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigurationError(f"--arg {text}: expected name=value")
        with contextlib.suppress(json.JSONDecodeError):
            arguments[name] = json.loads(value)
        arguments.setdefault(name, value)
    return arguments
