"""Fields that name files: their types have the annotation `Mark`."""

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

# Target of a path: a checkpoint, a draft model, an adapter, a tokenizer, prompt files, dumped
# rollouts, a Python function; or a word of a command, which may name a file.
PathKind = Literal["model", "draft", "adapter", "tokenizer", "data", "rollouts", "function", "word"]
VolumeName = Literal["model", "data"]
# Volume of the spec, spec.<name>.volume, to whose root a path is relative if the volume is set.
# Functions and words of commands are never in a volume.
VOLUMES: Mapping[PathKind, VolumeName] = {
    "model": "model",
    "draft": "model",
    "adapter": "model",
    "tokenizer": "model",
    "data": "data",
    "rollouts": "data",
}
DOTTED_PATH = r"^[^:]+(:[A-Za-z_][A-Za-z0-9_]*)$|^[A-Za-z_][\w]*(\.[A-Za-z_]\w*)+$"


@dataclass(frozen=True, slots=True)
class Mark:
    """Annotation of a type: the field names a file."""

    kind: PathKind


_Path = Annotated[str, Field(min_length=1, max_length=4096)]
# Directory of a Hugging Face checkpoint.
ModelPath = Annotated[_Path, Mark("model")]
# Directory of a checkpoint that proposes tokens to engines.
DraftPath = Annotated[_Path, Mark("draft")]
# Directory of a PEFT adapter.
AdapterPath = Annotated[_Path, Mark("adapter")]
# Directory of a tokenizer.
TokenizerPath = Annotated[_Path, Mark("tokenizer")]
# File or directory of prompts, optionally with a slice (`@[a:b]`).
DataPath = Annotated[_Path, Mark("data")]
# Directory of dumped rollouts.
RolloutsPath = Annotated[_Path, Mark("rollouts")]
# Python function: `package.module.function`, `package.module:function` or
# `path/to/file.py:function`.
UserFunction = Annotated[str, Field(pattern=DOTTED_PATH), Mark("function")]
# The word `none`, or a Python function as in UserFunction.
GenerateFunction = Annotated[str, Field(pattern=DOTTED_PATH + "|^none$"), Mark("function")]
# Word of a command: a file if one of this name exists (`command_word`).
CommandWord = Annotated[_Path, Mark("word")]
# The word `nonzero_std`, or a Python function as in UserFunction.
GroupFilter = Annotated[str, Field(pattern=DOTTED_PATH + "|^nonzero_std$"), Mark("function")]


@dataclass(frozen=True, slots=True)
class MarkedPath:
    """A path in a spec. field: where it is, such as `spec.data.prompts[0].path`."""

    field: str
    kind: PathKind
    value: str


def fields(model: type[Model]) -> list[tuple[tuple[str, ...], PathKind]]:
    """Return path in YAML and kind of the fields of a model that name files.

    A path is a tuple such as ("data", "prompts", "[]", "path").
    """
    return [(parts, mark.kind) for parts, mark in annotated_fields(model, Mark)]


def marked(model: type[Model], spec: Mapping[str, Any]) -> list[MarkedPath]:
    """Return all paths that a spec sets, in the order of the model's fields."""
    return [_read(place, kind) for parts, kind in fields(model) for place in _texts(spec, parts)]


def rewritten(
    model: type[Model], spec: Mapping[str, Any], new: Callable[[MarkedPath], str]
) -> dict[str, Any]:
    """Return a copy of the spec with every path replaced by `new(path)`."""
    document = copy.deepcopy(dict(spec))
    for parts, kind in fields(model):
        for place in _texts(document, parts):
            place.holder[place.key] = new(_read(place, kind))
    return document


def volume_of(path: MarkedPath, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the source of the volume that the path is relative to, or None."""
    name = VOLUMES.get(path.kind)
    return (spec.get(name) or {}).get("volume") if name else None


def command_word(word: str, base: Path) -> str:
    """Return the absolute path of a file of this name in `base`, or the word if there is none."""
    # Links are not followed: an interpreter finds its environment by its own path.
    file = os.path.abspath(base / Path(word).expanduser())
    return file if os.path.isfile(file) else word


def _texts(spec: Mapping[str, Any], parts: tuple[str, ...]) -> list[MarkedField]:
    return [place for place in places(spec, parts) if isinstance(place.holder[place.key], str)]


def _read(place: MarkedField, kind: PathKind) -> MarkedPath:
    return MarkedPath(field_path(place.location), kind, place.holder[place.key])
