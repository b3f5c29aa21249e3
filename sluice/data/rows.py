"""Parse one row of a prompt file. The columns tell slime's rows from verl's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sluice.api.groups.data import ImageLimits, PromptSource
from sluice.data.files import Row
from sluice.data.messages import MessageError, normalised, present, shown
from sluice.data.row_images import place_images, refuse_images
from sluice.images.image import referred
from sluice.images.reading import ImageError, RawImage
from sluice.input_checks import InputError, check_value, load_json

PROMPT_KEYS = ("prompt", "input")
# Keys of a message that say whether its tokens are trained on (slime: step_loss_mask).
MASKS = ("step_loss_mask", "loss_mask")
# Names that other data sets use for these columns, suggested in errors.
_OTHER_NAMES = {
    "promptKey": (
        "messages",
        "question",
        "problem",
        "query",
        "instruction",
        "text",
        "conversations",
    ),
    "labelKey": ("label", "answer", "solution", "ground_truth", "target", "output"),
}
_VERL = ("data_source", "ability", "reward_model", "extra_info")


@dataclass(frozen=True, slots=True)
class PromptRow:
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    # The images of the prompt, in the order of their parts, which refer to no image yet.
    images: tuple[RawImage, ...] = ()


class RowError(ValueError):
    """A row is wrong. The message says how; the caller knows the position."""


def is_verl(row: Row) -> bool:
    """Return whether a row is verl's, with data_source and reward_model; slime's has neither."""
    return "data_source" in row and isinstance(row.get("reward_model"), dict)


def parse_row(row: Row, source: PromptSource, images: ImageLimits | None = None) -> PromptRow:
    """Read a row with the column names of its source. Raises RowError.

    `images` is `data.images`; None refuses rows with images. Files of images are not read.

    slime: `prompt` (or `input`), `label`, `metadata`, `tools`. verl: `data_source`, `prompt` as
    chat messages, `reward_model.ground_truth` (the label), `ability` and `extra_info` with its
    `tools_kwargs` (into the metadata, with `data_source`).
    """
    _check_columns(row, source)
    prompt, found = _prompt(row, source, images)
    return PromptRow(
        prompt, _label(row, source), _metadata(row, source), _tools(row, source), found
    )


def _check_columns(row: Row, source: PromptSource) -> None:
    """Raise RowError if a column that is read holds a value that cannot be sent."""
    named = prompt_key(row, source), source.label_key or "label"
    of_verl = _VERL if is_verl(row) else ("reward_model",)
    for key in dict.fromkeys((*named, source.metadata_key, source.tools_key, *of_verl)):
        try:
            check_value(row.get(key), key or "", as_text=True)
        except InputError as error:
            raise RowError(str(error)) from error


# Reads the rows of a job: `parse_row`, or `answers.parse_answer` if they have given answers.
RowReader = Callable[[Row, PromptSource], PromptRow]


def problem(row: Row, source: PromptSource, read: RowReader = parse_row) -> str | None:
    """Return what is wrong with a row, or None."""
    try:
        read(row, source)
    except RowError as error:
        return str(error)
    return None


def prompt_key(row: Row, source: PromptSource, usual: Sequence[str] = PROMPT_KEYS) -> str | None:
    """Return the prompt's column if the row has it.

    `usual` are its names if the source does not set it.
    """
    keys = [source.prompt_key] if source.prompt_key else usual
    return next((key for key in keys if row.get(key) is not None), None)


def prompt_reader(images: ImageLimits | None) -> RowReader:
    """Return the reader of a job's rows without answers; `images` is `data.images`."""
    return partial(parse_row, images=images) if images else parse_row


def _prompt(
    row: Row, source: PromptSource, limits: ImageLimits | None
) -> tuple[str | list[dict[str, Any]], tuple[RawImage, ...]]:
    """Return the prompt and its images."""
    key = prompt_key(row, source)
    if key is None:
        raise RowError(
            missing(row, [source.prompt_key] if source.prompt_key else PROMPT_KEYS, "promptKey")
        )
    value: Any = row[key]
    found: tuple[RawImage, ...] = ()
    try:
        if limits is None:
            refuse_images(row, source)
        else:
            value, found = place_images(row, key, source, limits)
    except (ImageError, MessageError) as error:
        raise RowError(str(error)) from error
    if isinstance(value, str):
        if not value:
            raise RowError(f"{key}: the prompt is empty")
        return value, ()
    if not isinstance(value, list) or not value:
        raise RowError(
            f"{key}: expected a text or a list of chat messages with role and content, found "
            f"{shown(value)}"
        )
    messages = [_message(message, f"{key}[{position}]") for position, message in enumerate(value)]
    if limits is None and referred(messages):
        raise RowError(f"{key}: the row has images; set data.images: {{}}, or remove such rows")
    return messages, found


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a chat message without null fields, the same from JSON Lines and Parquet.

    Raises RowError if a template could not render it.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError(
            f"{where}: expected a chat message with role and content, found {shown(message)}"
        )
    kept: dict[str, Any] = present(message)
    try:
        calls = normalised(kept).get("tool_calls", [])
    except MessageError as error:
        raise RowError(f"{where}: {error}") from error
    if "content" not in kept and not calls:
        raise RowError(f"{where}: content: expected a text, found null")
    for position, call in enumerate(calls):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict):
            raise RowError(
                f"{where}: tool_calls[{position}]: arguments: expected an object, or one as JSON "
                f"text, found {shown(arguments)}"
            )
    for key in MASKS:
        if kept.get(key, 1) not in (0, 1):
            raise RowError(f"{where}: {key}: expected 0 or 1, found {shown(kept[key])}")
    return kept


def missing(row: Row, keys: Iterable[str], field: str) -> str:
    """Return a text that says which columns a row lacks and has, and which one may be meant."""
    keys = list(keys)
    names = [str(name) for name in row]
    expected = " or ".join(map(repr, keys))
    close = [
        match for key in keys for match in difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    ]
    meant = next(
        iter(
            [*close, *(name for name in _OTHER_NAMES[field] if name in names and name not in keys)]
        ),
        None,
    )
    columns = ", ".join(map(repr, names[:20])) or "none"
    return f"no column {expected}; the row has {columns}" + (
        f"; did you mean {field}: {meant}?" if meant else ""
    )


def likely_columns(row: Row) -> dict[str, str]:
    """Guess promptKey and labelKey from a row's columns."""
    names = {
        "promptKey": (*PROMPT_KEYS, *_OTHER_NAMES["promptKey"]),
        "labelKey": _OTHER_NAMES["labelKey"],
    }
    likely = {
        key: next((name for name in candidates if row.get(name) is not None), None)
        for key, candidates in names.items()
    }
    return {key: name for key, name in likely.items() if name}


def _label(row: Row, source: PromptSource) -> Any:
    if source.label_key:
        if source.label_key not in row:
            raise RowError(missing(row, [source.label_key], "labelKey"))
        return row[source.label_key]
    if "label" in row:
        return row["label"]
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _metadata(row: Row, source: PromptSource) -> dict[str, Any]:
    metadata = _json_column(row.get(source.metadata_key), dict, source.metadata_key) or {}
    if not is_verl(row):
        return dict(metadata)
    extra = _json_column(row.get("extra_info"), dict, "extra_info") or {}
    columns = {key: row[key] for key in ("data_source", "ability") if row.get(key) is not None}
    return {**columns, **extra, **metadata}


def _tools(row: Row, source: PromptSource) -> list[dict[str, Any]] | None:
    key = source.tools_key
    tools = _json_column(row.get(key), list, key) or []
    return [_tool(tool, f"{key}[{position}]") for position, tool in enumerate(tools)] or None


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """Return the definition of a tool without null fields.

    Its parameters, a schema, may hold nulls.
    """
    if not isinstance(tool, dict):
        raise RowError(
            f"{where}: expected the definition of a tool, an object, found {shown(tool)}"
        )
    tool = present(tool)
    function = tool.get("function")
    return {**tool, "function": present(function)} if isinstance(function, dict) else tool


def _json_column(value: Any, kind: type[dict[str, Any]] | type[list[Any]], key: str) -> Any:
    """Return a column's object or list, which may be JSON text, as Parquet writers prefer."""
    if isinstance(value, str) and value:
        try:
            value = load_json(value, key)
        except InputError as error:
            raise RowError(str(error)) from error
    if value is None or value == "":
        return None
    if not isinstance(value, kind):
        raise RowError(
            f"{key}: expected {'an object' if kind is dict else 'a list'}, found {shown(value)}"
        )
    return value
