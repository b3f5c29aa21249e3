"""`sluice data`: look at prompt files, and make others of them. Row by row, so a file may be larger
than the memory.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from sluice.api.groups.data import PromptSource
from sluice.data.answers import Encoded, cut, parse_answer
from sluice.data.files import Located, Row, read_source
from sluice.data.make import made_rows
from sluice.data.rows import RowError, parse_row
from sluice.data.transform import Shape, chosen, to_slime, to_verl, with_uid
from sluice.data.writers import Writer
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.exits import Exit
from sluice_cli.options import lacking

app = typer.Typer(help="Look at prompt files, convert and split them.", no_args_is_help=True)
InputFile = Annotated[
    str,
    typer.Argument(
        metavar="IN",
        help="File or directory (.jsonl, .json, .parquet), or a slice: file@[0:100].",
        show_default=False,
    ),
]
OutputFile = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="File to write: .jsonl, .json or .parquet.", show_default=False
    ),
]
PromptKey = Annotated[
    str | None, typer.Option(help="Column of the prompt. Default: prompt, else input.")
]
LabelKey = Annotated[
    str | None, typer.Option(help="Column of the label. Default: label, else verl's ground_truth.")
]
MetadataKey = Annotated[str, typer.Option(help="Column of the metadata.")]
ToolsKey = Annotated[str, typer.Option(help="Column of the tools.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files.")]
AsJson = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Bad input as one line."""
    try:
        yield
    except ConfigurationError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(Exit.INVALID) from error
    except ModuleNotFoundError as error:
        raise lacking(error) from error


def _source(
    path: str, prompt: str | None, label: str | None, metadata: str, tools: str
) -> PromptSource:
    try:
        return PromptSource(
            path=path, prompt_key=prompt, label_key=label, metadata_key=metadata, tools_key=tools
        )
    except ValidationError as error:
        raise ConfigurationError(f"{path!r}: expected the path of a prompt file") from error


def _each(rows: Iterable[Located], change: Callable[[Located], Row]) -> Iterator[Row]:
    """Changed rows; a RowError gets its place."""
    for located in rows:
        try:
            yield change(located)
        except RowError as error:
            raise ConfigurationError(f"{located.where}: {error}") from error


def _write(target: Path, rows: Iterable[Row], *, force: bool, as_json: bool) -> None:
    with Writer(target, force=force) as writer:
        for row in rows:
            writer.write(row)
    _say(
        {"rows": writer.rows, "file": str(target)}, f"{target}: {writer.rows} rows", as_json=as_json
    )


def _say(facts: dict[str, Any], text: str, *, as_json: bool) -> None:
    typer.echo(json.dumps(facts, ensure_ascii=False) if as_json else text)


MostRows = Annotated[
    int | None, typer.Option(min=1, help="Stop after so many rows: needed where it never ends.")
]


@app.command()
def inspect(
    source: InputFile,
    model: Annotated[
        Path | None, typer.Option(help="Model directory: count its tokens, use its chat template.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="applyChatTemplate: also texts go through the template.")
    ] = False,
    sft: Annotated[
        bool,
        typer.Option(
            "--sft",
            help="loss.type sft: rows with given answers; with --model, which are trained.",
        ),
    ] = False,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Count prompts that are longer.")
    ] = None,
    truncation: Annotated[
        Literal["left", "right"] | None,
        typer.Option(help="data.truncation, with --sft: which end of longer rows is cut off."),
    ] = None,
    prompt_key: PromptKey = None,
    label_key: LabelKey = None,
    metadata_key: MetadataKey = "metadata",
    tools_key: ToolsKey = "tools",
    as_json: AsJson = False,
) -> None:
    """Say what a prompt file holds. Exit code 1 where a row could not be used."""
    from sluice.data.inspection import inspect as look
    from sluice_cli.data.view import answers_of, lengths_of, show

    with _refusing():
        if max_prompt_tokens and not model:
            raise ConfigurationError(
                "--max-prompt-tokens needs --model: tokens are counted by its tokenizer"
            )
        if truncation and not sft:
            raise ConfigurationError("--truncation needs --sft: only given answers are cut")
        wanted = _source(source, prompt_key, label_key, metadata_key, tools_key)
        shorten = _shortening(max_prompt_tokens, truncation)
        render, length = answers_of(model, chat, shorten) if sft else lengths_of(model, chat)
        inspection = look(
            read_source(source),
            wanted,
            length,
            max_prompt_tokens,
            parse_answer if sft else parse_row,
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
        show(facts, inspection)
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
def convert(
    source: InputFile,
    target: OutputFile,
    to: Annotated[
        Shape | None, typer.Option(help="Rows of slime or verl. Default: as they are.")
    ] = None,
    data_source: Annotated[
        str, typer.Option(help="--to verl: data_source of rows that have none.")
    ] = "unknown",
    prompt_key: PromptKey = None,
    label_key: LabelKey = None,
    metadata_key: MetadataKey = "metadata",
    tools_key: ToolsKey = "tools",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write the rows to a file of another format, and in slime's or verl's columns."""
    with _refusing():
        wanted = _source(source, prompt_key, label_key, metadata_key, tools_key)
        changes: dict[Shape | None, Callable[[Located], Row]] = {
            None: lambda located: located.row,
            "slime": lambda located: to_slime(located.row, wanted),
            "verl": lambda located: to_verl(located.row, wanted, located.number, data_source),
        }
        _write(target, _each(read_source(source), changes[to]), force=force, as_json=as_json)


@app.command()
def add_uid(
    source: InputFile,
    target: OutputFile,
    prompt_key: PromptKey = None,
    label_key: LabelKey = None,
    metadata_key: MetadataKey = "metadata",
    tools_key: ToolsKey = "tools",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Give every row a `uid` in its metadata (verl: extra_info): the digest of prompt and label."""
    with _refusing():
        wanted = _source(source, prompt_key, label_key, metadata_key, tools_key)
        seen: Counter[str] = Counter()
        rows = _each(read_source(source), lambda located: with_uid(located.row, wanted, seen))
        _write(target, rows, force=force, as_json=as_json)


@app.command()
def split(
    source: InputFile,
    train: Annotated[Path, typer.Option(help="File for the larger part.", show_default=False)],
    test: Annotated[Path, typer.Option(help="File for the held-out part.", show_default=False)],
    test_rows: Annotated[
        float, typer.Option(help="Held-out rows: a number, or a share below 1.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Another seed, another choice.")] = 42,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Hold out random rows. Both parts keep the order of the file;
    the same seed gives the same parts.
    """
    with _refusing():
        total = sum(1 for _ in read_source(source))
        wanted = round(test_rows * total) if test_rows < 1 else round(test_rows)
        if not 0 < wanted < total:
            raise ConfigurationError(
                f"--test-rows {test_rows:g}: {wanted} of {total} rows; each part needs at least one"
            )
        if train.resolve() == test.resolve():
            raise ConfigurationError(f"{train}: --train and --test are the same file")
        with Writer(train, force=force) as kept, Writer(test, force=force) as held:
            for located, out in zip(read_source(source), chosen(total, wanted, seed), strict=True):
                (held if out else kept).write(located.row)
        facts = {
            "train": {"rows": kept.rows, "file": str(train)},
            "test": {"rows": held.rows, "file": str(test)},
        }
        _say(facts, f"{train}: {kept.rows} rows\n{test}: {held.rows} rows", as_json=as_json)


@app.command()
def materialise(
    function: Annotated[
        str,
        typer.Argument(
            help="package.module.name, or path/file.py:name: gives rows when it is called."
        ),
    ],
    target: OutputFile,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="NAME=VALUE", help="Argument of it; the value is JSON, or text."
        ),
    ] = None,
    rows: MostRows = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write what your own code yields to a prompt file.

    A job does so by itself for `data.prompts[].source`; this is for files that several jobs share,
    or that take long.
    """
    with _refusing():
        produced = _own_rows(function, _arguments(arguments or []), rows)
        _write(target, produced, force=force, as_json=as_json)


@app.command("from-verifiers")
def from_verifiers(
    name: Annotated[str, typer.Argument(help="Id of a taskset that is installed there.")],
    target: OutputFile,
    python: Annotated[
        str | None, typer.Option(help="Interpreter that has verifiers. Default: this one.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="NAME=VALUE", help="Of its configuration; the value is JSON, or text."
        ),
    ] = None,
    rows: MostRows = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write the tasks of an environment of verifiers to a prompt file.

    `rollout.environment.verifiers` of the same name and arguments plays them.
    """
    from sluice_cli.data.verifiers_rows import rows_of

    with _refusing():
        produced = rows_of(name, _arguments(arguments or []), python, rows)
        _write(target, produced, force=force, as_json=as_json)


@app.command()
def seeds(
    target: OutputFile,
    rows: Annotated[int, typer.Option(min=1, help="How many: one for each seed.")],
    prompt: Annotated[
        str, typer.Option(help="The task, in words: the environment's first observation follows.")
    ],
    first: Annotated[int, typer.Option(min=0, help="Seed of the first row.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write rows for an environment that draws its tasks from a seed.

    `rollout.environment.gym` and `openenv` reset it with `metadata.reset` of the row. Rows of other
    seeds are held out.
    """
    with _refusing():
        numbers = range(first, first + rows)
        produced = ({"prompt": prompt, "metadata": {"reset": {"seed": n}}} for n in numbers)
        _write(target, produced, force=force, as_json=as_json)


def _own_rows(function: str, arguments: dict[str, Any], rows: int | None) -> Iterator[Row]:
    """The rows of a user's function. What it raises is told in a line, with the place
    in its code.
    """
    number = 0
    try:
        for number, row in enumerate(made_rows(function, arguments, rows), start=1):  # noqa: B007 - told if it raises
            yield row
    except ConfigurationError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = (
            f"{function} raised {type(error).__name__} after {number} rows "
            f"({place.filename}:{place.lineno}): {error}"
        )
        raise ConfigurationError(text) from error
    if not number:
        raise ConfigurationError(f"{function} gave no rows")


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
