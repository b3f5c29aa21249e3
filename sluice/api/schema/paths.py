"""Fields that name files: what is marked as such in its type."""

from __future__ import annotations

import copy
import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sluice.api.schema.annotations import MarkedField, annotated_fields, field_path, places
from sluice.api.schema.base import Model

PathKind = Literal["model", "tokenizer", "data", "rollouts", "function", "word"]
"""Kind of a path's target: a checkpoint, a tokenizer, prompt files, dumped rollouts, a Python
function; or a word of a command, which may name a file."""
VolumeName = Literal["model", "data"]
VOLUMES: Mapping[PathKind, VolumeName] = {
    "model": "model",
    "tokenizer": "model",
    "data": "data",
    "rollouts": "data",
}
"""Volume of the spec, spec.<name>.volume, to whose root a path is relative if it is there.
Functions and words of commands never are."""
DOTTED_PATH = r"^[^:]+(:[A-Za-z_][A-Za-z0-9_]*)$|^[A-Za-z_][\w]*(\.[A-Za-z_]\w*)+$"


@dataclass(frozen=True, slots=True)
class Mark:
    """Part of a field's type: the field names a file."""

    kind: PathKind


_Path = Annotated[str, Field(min_length=1, max_length=4096)]
ModelPath = Annotated[_Path, Mark("model")]
"""Directory of a Hugging Face checkpoint."""
TokenizerPath = Annotated[_Path, Mark("tokenizer")]
"""Directory of a tokenizer."""
DataPath = Annotated[_Path, Mark("data")]
"""File or directory of prompts, with or without a slice (`@[a:b]`)."""
RolloutsPath = Annotated[_Path, Mark("rollouts")]
"""Directory of dumped rollouts."""
UserFunction = Annotated[str, Field(pattern=DOTTED_PATH), Mark("function")]
"""A Python function: `package.module.function`, `package.module:function` or
`path/to/file.py:function`."""
GenerateFunction = Annotated[str, Field(pattern=DOTTED_PATH + "|^none$"), Mark("function")]
"""The word `none`, or a Python function as in UserFunction."""
CommandWord = Annotated[_Path, Mark("word")]
"""A word of a command: a file where there is one of this name (`command_word`)."""
GroupFilter = Annotated[str, Field(pattern=DOTTED_PATH + "|^nonzero_std$"), Mark("function")]
"""The word `nonzero_std`, or a Python function as in UserFunction."""


@dataclass(frozen=True, slots=True)
class MarkedPath:
    """A path that a spec sets. field: `spec.data.prompts[0].path`."""

    field: str
    kind: PathKind
    value: str


def fields(model: type[Model]) -> list[tuple[tuple[str, ...], PathKind]]:
    """Fields of a model that name files, by their names in YAML: ("data", "prompts", "[]", "path")
    and the kind.
    """
    return [(parts, mark.kind) for parts, mark in annotated_fields(model, Mark)]


def marked(model: type[Model], spec: Mapping[str, Any]) -> list[MarkedPath]:
    """All paths that a spec sets, in the order of the model's fields."""
    return [_read(place, kind) for parts, kind in fields(model) for place in _texts(spec, parts)]


def rewritten(
    model: type[Model], spec: Mapping[str, Any], new: Callable[[MarkedPath], str]
) -> dict[str, Any]:
    """A copy of the spec in which `new` has replaced every path."""
    document = copy.deepcopy(dict(spec))
    for parts, kind in fields(model):
        for place in _texts(document, parts):
            place.holder[place.key] = new(_read(place, kind))
    return document


def volume_of(path: MarkedPath, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """Source of the volume that the path is relative to; None: it is relative to none."""
    name = VOLUMES.get(path.kind)
    return (spec.get(name) or {}).get("volume") if name else None


def command_word(word: str, base: Path) -> str:
    """The word; or, where a file of this name lies in `base`, that file's absolute path.

    Links are not followed: an interpreter knows by its own path which environment it is of.
    """
    file = os.path.abspath(base / Path(word).expanduser())
    return file if os.path.isfile(file) else word


def _texts(spec: Mapping[str, Any], parts: tuple[str, ...]) -> list[MarkedField]:
    return [place for place in places(spec, parts) if isinstance(place.holder[place.key], str)]


def _read(place: MarkedField, kind: PathKind) -> MarkedPath:
    return MarkedPath(field_path(place.location), kind, place.holder[place.key])
