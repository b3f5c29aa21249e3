"""Write a Python function into a file, so that a pod or another process can import it.

A function from a module is named by the module's file. A function from a notebook or an interactive
session is written out: its source, its imports, and the functions and plain constants that it uses.
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

# Types whose repr is their source.
_CONSTANTS = (str, bytes, int, float, bool, type(None))


def file_of(function: Callable[..., Any]) -> Path | None:
    """Return the file that the function can be imported from, or None."""
    # A notebook's module is __main__, and a nested function or a method has a dotted qualname.
    if function.__module__ == "__main__" or function.__qualname__ != function.__name__:
        return None
    path = Path(inspect.getfile(function))
    return path.resolve() if path.suffix == ".py" and path.exists() else None


def source_of(function: Callable[..., Any]) -> str:
    """Return the text of a module that defines the function.

    Raises ClientError if the function, or an object that it uses, has no source text.
    """
    if not isinstance(function, FunctionType) or function.__closure__:
        raise ClientError(
            f"{_name(function)}: expected a function defined at the top level; put a function that "
            "is defined inside another, or an object with __call__, into a file and pass "
            "PATH.py:NAME"
        )
    parts: dict[str, str] = {}
    _collect(function, parts)
    lines = sorted(text for text in parts.values() if text.startswith(("import ", "from ")))
    rest = [text for text in parts.values() if text not in lines]
    return "\n".join(["from __future__ import annotations", "", *lines, ""]) + "\n\n".join(rest)


def _collect(function: FunctionType, parts: dict[str, str]) -> None:
    """Add the definitions that the function uses, then the function."""
    for name in sorted(set(_globals(function.__code__))):
        if name in parts or name == function.__name__ or name not in function.__globals__:
            continue
        value = function.__globals__[name]
        # A function of the same session has no module that could be imported.
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            _collect(value, parts)
        else:
            parts[name] = _statement(name, value, function)
    try:
        parts[function.__name__] = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise ClientError(
            f"{function.__name__}: Python does not know its source; put it into a file and pass "
            "PATH.py:NAME"
        ) from error


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the global names that a code object, and code objects inside it, may look up."""
    yield from (name for name in code.co_names if not hasattr(builtins, name))
    # Lambdas, comprehensions and inner functions are constants of the code around them.
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _statement(name: str, value: Any, function: FunctionType) -> str:
    """Return an import or an assignment that gives `name` its value."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, _CONSTANTS) or _is_plain(value):
        return f"{name} = {value!r}"
    module = getattr(value, "__module__", None)
    if module not in (None, "__main__") and getattr(value, "__name__", "") == value.__qualname__:
        return f"from {module} import {value.__name__} as {name}"
    raise ClientError(
        f"{function.__name__} uses {name}, a {type(value).__name__} of this session, which cannot "
        "be written into a file: move both into a file and pass PATH.py:NAME"
    )


def _is_plain(value: Any) -> bool:
    """Tell whether a value is a container of constants."""
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(part) for part in value)
    return isinstance(value, _CONSTANTS)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
