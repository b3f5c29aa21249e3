"""A user's functions: `package.module.function`, `package.module:function` or `path/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


class LoadError(Exception):
    """The function cannot be had. The message names the path and the cause."""


@cache
def load(dotted: str) -> Callable[..., Any]:
    """The function behind a dotted path."""
    module_name, _, name = dotted.rpartition(":") if ":" in dotted else dotted.rpartition(".")
    try:
        module = _file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise LoadError(f"{dotted}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise LoadError(f"{dotted}: {module_name} has no function {name!r}; it has {', '.join(names) or 'none'}")
    return function  # type: ignore[no-any-return]


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"sluice_custom_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
