"""Fields whose types say more than their form: marked there, and walked here, so that nobody keeps
a list of them.

A spec is walked as YAML or JSON holds it, beside the model that describes it. What the model does
not describe is left alone, so a spec that another version of sluice stored is walked too.
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
Location = tuple[str | int, ...]
"""Keys and indices that lead to a place: ("spec", "data", "prompts", 0, "path")."""


@dataclass(frozen=True, slots=True)
class MarkedField:
    """Where a document sets a marked field, in `holder[key]`. holder: an object or a list."""

    holder: Any
    key: str | int
    location: Location


def field_path(location: Sequence[str | int]) -> str:
    """('spec', 'data', 'prompts', 0, 'path') -> spec.data.prompts[0].path"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@cache
def annotated_fields(model: type[Model], kind: type[M]) -> tuple[tuple[tuple[str, ...], M], ...]:
    """Fields with a mark of a kind, by their names in YAML: ("data", "prompts", "[]", "path") and
    the mark.
    """
    return tuple(_marks(model, (), kind))


def places(document: Any, parts: Sequence[str], at: Location = ("spec",)) -> Iterator[MarkedField]:
    """Where a document sets the field at the end of these parts."""
    head, rest = parts[0], parts[1:]
    for key in _keys(document, head):
        if rest:
            yield from places(document[key], rest, (*at, key))
        else:
            yield MarkedField(document, key, (*at, key))


def _marks(
    annotation: Any, metadata: Sequence[Any], kind: type[M]
) -> Iterator[tuple[tuple[str, ...], M]]:
    """Marks within a type, each with the way to it."""
    mark = next((each for each in metadata if isinstance(each, kind)), None)
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
            (("[]", *parts), each) for parts, each in _marks(get_args(annotation)[0], (), kind)
        )
    elif inspect.isclass(annotation) and issubclass(annotation, Model):
        for name, info in annotation.model_fields.items():
            way = info.alias or name
            yield from (
                ((way, *parts), each)
                for parts, each in _marks(info.annotation, info.metadata, kind)
            )


def _keys(document: Any, part: str) -> Sequence[str | int]:
    if part == "[]":
        return range(len(document)) if isinstance(document, list) else ()
    return (part,) if isinstance(document, Mapping) and part in document else ()
