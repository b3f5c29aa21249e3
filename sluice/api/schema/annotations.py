"""Annotations of field types, and the values of annotated fields in a spec.

A field's type says what the field holds (a path, an object of Kubernetes), so that no list of such
fields is kept. A spec is walked as YAML or JSON along the model. Fields that the model does not
have are left alone, so that specs of other versions can be walked too.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from sluice.api.schema.base import Model

M = TypeVar("M")
# Keys and indices that lead to a value: ("spec", "data", "prompts", 0, "path").
Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class MarkedField:
    """A value of an annotated field in a document, `holder[key]`. holder: an object or a list."""

    holder: Any
    key: str | int
    location: Location


def field_path(location: Sequence[str | int]) -> str:
    """Write a location as a path: spec.data.prompts[0].path."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@cache
def annotated_fields(model: type[Model], kind: type[M]) -> tuple[tuple[tuple[str, ...], M], ...]:
    """Return the fields of a model with an annotation of a kind.

    Returns
    -------
    Pairs of the path in YAML, such as ("data", "prompts", "[]", "path"), and the annotation.

    """
    return tuple(_marks(model, (), kind))


def places(document: Any, parts: Sequence[str], at: Location = ("spec",)) -> Iterator[MarkedField]:
    """Yield the values of a field in a document. parts: the path of the field in YAML."""
    head, rest = parts[0], parts[1:]
    for key in _keys(document, head):
        if rest:
            yield from places(document[key], rest, (*at, key))
        else:
            yield MarkedField(document, key, (*at, key))


def _marks(
    annotation: Any, metadata: Sequence[Any], kind: type[M]
) -> Iterator[tuple[tuple[str, ...], M]]:
    """Yield the annotations of a kind within a type, each with the path to it."""
    mark = next((entry for entry in metadata if isinstance(entry, kind)), None)
    origin = get_origin(annotation)
    if mark is not None:
        yield (), mark
    elif origin is Annotated:
        inner, *further = get_args(annotation)
        yield from _marks(inner, further, kind)
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _marks(option, (), kind)
    elif origin is list:
        yield from (
            (("[]", *parts), mark) for parts, mark in _marks(get_args(annotation)[0], (), kind)
        )
    elif inspect.isclass(annotation) and issubclass(annotation, Model):
        for name, info in annotation.model_fields.items():
            way = info.alias or name
            yield from (
                ((way, *parts), mark)
                for parts, mark in _marks(info.annotation, info.metadata, kind)
            )


def _keys(document: Any, part: str) -> Sequence[str | int]:
    if part == "[]":
        return range(len(document)) if isinstance(document, list) else ()
    return (part,) if isinstance(document, Mapping) and part in document else ()
