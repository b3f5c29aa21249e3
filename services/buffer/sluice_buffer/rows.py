"""One row of a prompt file -> what a worker needs of it. slime's and verl's rows are told apart by their columns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sluice.api.data import PromptSource
from sluice_buffer.readers import Row


@dataclass(frozen=True, slots=True)
class PromptRow:
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None


class RowError(ValueError):
    """What is wrong with a row; the reader knows where it is."""


def parse_row(row: Row, source: PromptSource) -> PromptRow:
    """Read a row as the source says. Raises RowError.

    slime: `prompt` (or `input`), `label`, `metadata`, `tools`. verl: `data_source`, `prompt` as chat messages,
    `reward_model.ground_truth` (the label), `extra_info` (into the metadata, with `data_source`).
    """
    return PromptRow(_prompt(row, source), _label(row, source), _metadata(row, source), _tools(row, source))


def problem(row: Row, source: PromptSource) -> str | None:
    try:
        parse_row(row, source)
    except RowError as error:
        return str(error)
    return None


def _prompt(row: Row, source: PromptSource) -> str | list[dict[str, Any]]:
    keys = [source.prompt_key] if source.prompt_key else ["prompt", "input"]
    key = next((k for k in keys if row.get(k) is not None), None)
    if key is None:
        raise RowError(
            f"no column {' or '.join(repr(k) for k in keys)}; the row has {', '.join(map(repr, row)) or 'none'}"
        )
    value = row[key]
    if isinstance(value, str):
        if not value:
            raise RowError(f"{key}: the prompt is empty")
        return value
    if isinstance(value, list) and value and all(_is_message(m) for m in value):
        return value
    raise RowError(f"{key}: expected a text or a list of chat messages with role and content, found {_shown(value)}")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _label(row: Row, source: PromptSource) -> Any:
    if source.label_key:
        if source.label_key not in row:
            raise RowError(f"no column {source.label_key!r} (labelKey)")
        return row[source.label_key]
    if "label" in row:
        return row["label"]
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _metadata(row: Row, source: PromptSource) -> dict[str, Any]:
    given = _json_column(row.get(source.metadata_key), dict, source.metadata_key) or {}
    if "data_source" not in row or not isinstance(row.get("reward_model"), dict):
        return dict(given)
    extra = _json_column(row.get("extra_info"), dict, "extra_info") or {}
    return {"data_source": row["data_source"], **extra, **given}


def _tools(row: Row, source: PromptSource) -> list[dict[str, Any]] | None:
    tools = _json_column(row.get(source.tools_key), list, source.tools_key)
    return list(tools) if tools else None


def _json_column(value: Any, kind: type[dict[str, Any]] | type[list[Any]], key: str) -> Any:
    """A column that holds an object or list, either itself or as JSON text (as Parquet writers like to have it)."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RowError(f"{key}: not valid JSON: {error}") from error
    if value is None or value == "":
        return None
    if not isinstance(value, kind):
        raise RowError(f"{key}: expected {'an object' if kind is dict else 'a list'}, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
