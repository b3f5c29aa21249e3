"""Fields that name files: marked in their types, and walked here, so that nobody keeps a list of them.

A spec is walked as YAML or JSON holds it, beside the model that describes it. What the model does not describe is
left alone, so a spec that another version of sluice stored is walked too.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field

from sluice.api.base import Model

PathKind = Literal["model", "tokenizer", "data", "rollouts", "function"]
"""What a path leads to: a checkpoint, a tokenizer, prompt files, dumped rollouts, a Python function."""
VolumeName = Literal["model", "data"]
VOLUMES: Mapping[PathKind, VolumeName] = {
    "model": "model", "tokenizer": "model", "data": "data", "rollouts": "data",
}  # fmt: skip
"""Where a path is relative to the root of a volume if the spec has one: spec.<name>.volume. Functions never are."""
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
"""A Python function: `package.module.function`, `package.module:function` or `path/to/file.py:function`."""
LossFunction = Annotated[str, Field(pattern=DOTTED_PATH + "|^sft$"), Mark("function")]
"""The word `sft`, or a Python function as in UserFunction."""
GenerateFunction = Annotated[str, Field(pattern=DOTTED_PATH + "|^none$"), Mark("function")]
"""The word `none`, or a Python function as in UserFunction."""
GroupFilter = Annotated[str, Field(pattern=DOTTED_PATH + "|^nonzero_std$"), Mark("function")]
"""The word `nonzero_std`, or a Python function as in UserFunction."""


@dataclass(frozen=True, slots=True)
class MarkedPath:
    """A path that a spec sets. field: `spec.data.prompts[0].path`."""

    field: str
    kind: PathKind
    value: str


@cache
def fields(model: type[Model]) -> tuple[tuple[tuple[str, ...], PathKind], ...]:
    """Fields of a model that name files, by their names in YAML: ("data", "prompts", "[]", "path") and the kind."""
    return tuple(_marks(model, ()))


def marked(model: type[Model], spec: Mapping[str, Any]) -> list[MarkedPath]:
    """All paths that a spec sets, in the order of the model's fields."""
    return [_read(place, kind) for parts, kind in fields(model) for place in _places(spec, parts, "spec")]


def rewritten(model: type[Model], spec: Mapping[str, Any], new: Callable[[MarkedPath], str]) -> dict[str, Any]:
    """A copy of the spec in which `new` has replaced every path."""
    document = copy.deepcopy(dict(spec))
    for parts, kind in fields(model):
        for place in _places(document, parts, "spec"):
            place.holder[place.key] = new(_read(place, kind))
    return document


def volume_of(path: MarkedPath, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """Source of the volume that the path is relative to; None: it is relative to none."""
    name = VOLUMES.get(path.kind)
    return (spec.get(name) or {}).get("volume") if name else None


@dataclass(frozen=True, slots=True)
class _Place:
    """holder[key] is a path; holder: an object or a list."""

    holder: Any
    key: str | int
    field: str


def _read(place: _Place, kind: PathKind) -> MarkedPath:
    return MarkedPath(place.field, kind, place.holder[place.key])


def _marks(annotation: Any, metadata: Sequence[Any]) -> Iterator[tuple[tuple[str, ...], PathKind]]:
    """Marks within a type, each with the way to it."""
    mark = next((each for each in metadata if isinstance(each, Mark)), None)
    origin = get_origin(annotation)
    if mark is not None:
        yield (), mark.kind
    elif origin is Annotated:
        inner, *further = get_args(annotation)
        yield from _marks(inner, further)
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _marks(option, ())
    elif origin is list:
        yield from ((("[]", *parts), kind) for parts, kind in _marks(get_args(annotation)[0], ()))
    elif inspect.isclass(annotation) and issubclass(annotation, Model):
        for name, info in annotation.model_fields.items():
            way = info.alias or name
            yield from (((way, *parts), kind) for parts, kind in _marks(info.annotation, info.metadata))


def _places(document: Any, parts: Sequence[str], at: str) -> Iterator[_Place]:
    """Where a document sets the field at the end of these parts."""
    head, rest = parts[0], parts[1:]
    for key in _keys(document, head):
        field = f"{at}[{key}]" if head == "[]" else f"{at}.{key}"
        if rest:
            yield from _places(document[key], rest, field)
        elif isinstance(document[key], str):
            yield _Place(document, key, field)


def _keys(document: Any, part: str) -> Sequence[str | int]:
    if part == "[]":
        return range(len(document)) if isinstance(document, list) else ()
    return (part,) if isinstance(document, Mapping) and part in document else ()
