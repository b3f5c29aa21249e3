"""Fields that name files: their types have the annotation `Mark`."""

from __future__ import annotations

import copy
import os.path
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from sluice.api.schema.annotations import MarkedField, annotated_fields, field_path, places
from sluice.api.schema.base import Model
from sluice.uri import Uri, UriError, parse_uri

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
# Kinds of paths that may be URIs.
REMOTE: tuple[PathKind, ...] = ("model", "draft", "adapter", "tokenizer", "data")
SCHEMES = ("hf", "s3", "gs", "az", "https", "http", "file")
_PREFIXES = [f"{scheme}://" for scheme in SCHEMES]
_SLICE = re.compile(r"^(?P<path>.+)(?P<slice>@\[(-?\d+)?:(-?\d+)?\])$")
DOTTED_PATH = r"^[^:]+(:[A-Za-z_][A-Za-z0-9_]*)$|^[A-Za-z_][\w]*(\.[A-Za-z_]\w*)+$"


@dataclass(frozen=True, slots=True)
class Mark:
    """Annotation of a type: the field names a file."""

    kind: PathKind


class PathOrUri:
    """Annotation of a string type: a path, or a URI that sluice can fetch."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        rule = {
            "rule": f"!self.contains('://') || self.matches('^({'|'.join(SCHEMES)})://.')",
            "message": f"expected a path, or a URI that begins with {', '.join(_PREFIXES)}",
        }
        return {**handler(schema), "x-kubernetes-validations": [rule]}

    def _check(self, text: str) -> str:
        try:
            parse_uri(split_slice(text)[0])
        except UriError as error:
            raise PydanticCustomError("rule", "{message}", {"message": str(error)}) from error
        return text


_Path = Annotated[str, Field(min_length=1, max_length=4096)]
_PathOrUri = Annotated[_Path, PathOrUri()]
# Directory of a Hugging Face checkpoint.
ModelPath = Annotated[_PathOrUri, Mark("model")]
# Directory of a checkpoint that proposes tokens to engines.
DraftPath = Annotated[_PathOrUri, Mark("draft")]
# Directory of a PEFT adapter.
AdapterPath = Annotated[_PathOrUri, Mark("adapter")]
# Directory of a tokenizer.
TokenizerPath = Annotated[_PathOrUri, Mark("tokenizer")]
# File or directory of prompts, optionally with a slice (`@[a:b]`).
DataPath = Annotated[_PathOrUri, Mark("data")]
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


def split_slice(text: str) -> tuple[str, str]:
    """Split `rows.jsonl@[0:100]` into `rows.jsonl` and `@[0:100]`; the second may be empty."""
    match = _SLICE.match(text)
    return (match["path"], match["slice"]) if match else (text, "")


def uri_of(path: MarkedPath) -> Uri | None:
    """Return the URI that a path is, without its slice, or None."""
    return parse_uri(split_slice(path.value)[0]) if path.kind in REMOTE else None


def command_word(word: str, base: Path) -> str:
    """Return the absolute path of a file of this name in `base`, or the word if there is none."""
    # Links are not followed: an interpreter finds its environment by its own path.
    file = os.path.abspath(base / Path(word).expanduser())
    return file if os.path.isfile(file) else word


def _texts(spec: Mapping[str, Any], parts: tuple[str, ...]) -> list[MarkedField]:
    return [place for place in places(spec, parts) if isinstance(place.holder[place.key], str)]


def _read(place: MarkedField, kind: PathKind) -> MarkedPath:
    return MarkedPath(field_path(place.location), kind, place.holder[place.key])
