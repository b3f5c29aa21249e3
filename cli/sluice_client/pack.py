"""A Python function as a file of its own, so that a pod, or another process, can import it.

A function of a module's file is named by that file. One of a notebook or a prompt is written down:
its source, the functions of the notebook that it calls, its imports and plain constants.
"""

from __future__ import annotations

import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from sluice_client.errors import ClientError

_CONSTANTS = (str, bytes, int, float, bool, type(None))


def file_of(function: Callable[..., Any]) -> Path | None:
    """The file that the function can be imported from; None: there is none."""
    if function.__module__ == "__main__" or function.__qualname__ != function.__name__:
        return None
    path = Path(inspect.getfile(function))
    return path.resolve() if path.suffix == ".py" and path.exists() else None


def source_of(function: Callable[..., Any]) -> str:
    """A module that defines the function. Raises ClientError for what cannot be written down."""
    if not isinstance(function, FunctionType) or function.__closure__:
        raise ClientError(
            f"{_name(function)}: expected a function of a module's top level; one that is made "
            "inside another, or an object with __call__, has to lie in a file: give PATH.py:NAME"
        )
    parts: dict[str, str] = {}
    _collect(function, parts)
    lines = sorted(text for text in parts.values() if text.startswith(("import ", "from ")))
    rest = [text for text in parts.values() if text not in lines]
    return "\n".join(["from __future__ import annotations", "", *lines, ""]) + "\n\n".join(rest)


def _collect(function: FunctionType, parts: dict[str, str]) -> None:
    """Add what the function needs before it, then the function."""
    for name in sorted(set(_globals(function.__code__))):
        if name in parts or name == function.__name__ or name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            _collect(value, parts)
        else:
            parts[name] = _statement(name, value, function)
    try:
        parts[function.__name__] = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise ClientError(
            f"{function.__name__}: its source is not known; write it into a file, and give "
            "PATH.py:NAME"
        ) from error


def _globals(code: CodeType) -> Iterator[str]:
    """Names that code, and code inside it, may look up outside."""
    yield from (name for name in code.co_names if not hasattr(builtins, name))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _statement(name: str, value: Any, function: FunctionType) -> str:
    """An import or an assignment that gives `name` its value."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, _CONSTANTS) or _is_plain(value):
        return f"{name} = {value!r}"
    module = getattr(value, "__module__", None)
    if module not in (None, "__main__") and getattr(value, "__name__", "") == value.__qualname__:
        return f"from {module} import {value.__name__} as {name}"
    raise ClientError(
        f"{function.__name__} uses {name}, a {type(value).__name__} of this session, which cannot "
        "be written down: move both into a file, and give PATH.py:NAME"
    )


def _is_plain(value: Any) -> bool:
    """True for containers of constants."""
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(part) for part in value)
    return isinstance(value, _CONSTANTS)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
