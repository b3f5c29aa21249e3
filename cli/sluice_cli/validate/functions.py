"""Does a user's Python file have the function that a job names? It is read, never run: that is for
the pods.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sluice.api.schema.suggestions import meant


def problem_of(dotted: str) -> str | None:
    """The fault of `path/to/file.py:name`; None: there is none, or it is of a package, which only a
    pod has.
    """
    name_of_file, _, name = dotted.rpartition(":")
    if not name_of_file:
        return (
            f"{dotted} names no function; expected {dotted}:name"
            if dotted.endswith(".py")
            else None
        )
    path = Path(name_of_file)
    if path.suffix != ".py":
        return None
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        return (
            f"there is no file {path}"
            if isinstance(error, FileNotFoundError)
            else f"{path}: {error.strerror}"
        )
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{path}{line}: not valid Python: {getattr(error, 'msg', error)}"
    known = set(_names(tree))
    return (
        None
        if name in known or "*" in known
        else f"{path} has no function {name!r}; {meant(name, known)}"
    )


def _names(node: ast.AST) -> Iterator[str]:
    """Names that a module binds at its top level; `*` where only running it can tell."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield "*" if child.name == "__getattr__" else child.name
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.Name) and child.id in ("globals", "exec", "setattr"):
            yield "*"
        elif not isinstance(child, ast.Lambda):
            yield from _names(child)
