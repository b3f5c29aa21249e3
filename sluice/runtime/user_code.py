"""Loading of user functions.

A name is `package.module.function`, `package.module:function` or `path/file.py:function`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sluice.runtime import function_adapters


class LoadError(Exception):
    """The function cannot be loaded. The message names the path and the cause."""


@cache
def load(dotted: str) -> Callable[..., Any]:
    """Load the function at a dotted path.

    Its file may import other files of its directory, and what adapters of other projects provide.
    """
    for adapter in function_adapters.installed():
        adapter.install_stubs()
    module_name, _, name = dotted.rpartition(":") if ":" in dotted else dotted.rpartition(".")
    if not module_name or dotted.endswith(".py"):
        raise LoadError(
            f"{dotted} names no function; expected package.module.name or path/to/file.py:name"
        )
    try:
        module = (
            _file(Path(module_name))
            if module_name.endswith(".py")
            else importlib.import_module(module_name)
        )
    except Exception as error:  # the user's module may raise anything
        raise LoadError(
            f"{dotted}: cannot import {module_name}: {type(error).__name__}: {error}"
            f"{function_adapters.advice(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise LoadError(
            f"{dotted}: {module_name} has no function {name!r}; it has {', '.join(names) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def is_loaded() -> bool:
    """True if this process has loaded a user function."""
    return load.cache_info().currsize > 0


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"sluice_custom_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    if (neighbours := str(path.resolve().parent)) not in sys.path:
        sys.path.append(neighbours)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def load_reward(dotted: str) -> Callable[[Any], Any]:
    """Load a reward function as a function of a sample, or of a list of samples.

    sluice's form is f(sample); adapters (`function_adapters`) convert those of other projects.
    """
    function = load(dotted)
    for adapter in function_adapters.installed():
        if reward := adapter.reward(function):
            return reward
    return function


def _main(functions: list[str]) -> None:
    """Print what is wrong with each function, as the last line: a JSON list, "" for a good one.

    Output of the modules goes to standard error.
    """
    problems = []
    with contextlib.redirect_stdout(sys.stderr):
        for dotted in functions:
            try:
                load(dotted)
                problems.append("")
            except LoadError as error:
                problems.append(str(error))
    print(json.dumps(problems))


if __name__ == "__main__":
    _main(sys.argv[1:])
