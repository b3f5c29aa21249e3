"""Options that several commands share, declared once as the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its parameters that are dataclasses.

    Typer reads options from a function's signature. The returned function has a signature with the
    fields in place of the dataclasses, and calls `command` with the dataclasses made from them.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        if not is_dataclass(annotation):
            parameters.append(_keyword(parameter.name, annotation, parameter.default))
            continue
        assert isinstance(annotation, type)
        groups[parameter.name] = annotation
        field_hints = get_type_hints(annotation, include_extras=True)
        for field in fields(annotation):
            parameters.append(_keyword(field.name, field_hints[field.name], field.default))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    # Parameters that are keywords may follow others in any order, with a default or without.
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
