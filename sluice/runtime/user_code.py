"""A user's functions: `package.module.function`, `package.module:function` or
`path/file.py:function`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from sluice.peers import modules
from sluice.peers.slime.types import Sample, Status


class LoadError(Exception):
    """The function cannot be had. The message names the path and the cause."""


@cache
def load(dotted: str) -> Callable[..., Any]:
    """The function behind a dotted path. Its file may import its neighbours, and of slime and verl
    what `sluice.peers` has.
    """
    modules.install()
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
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise LoadError(
            f"{dotted}: {module_name} has no function {name!r}; it has {', '.join(names) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def is_loaded() -> bool:
    """True where this process has loaded a user's function."""
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
    """A reward function as one of a sample (or of a list of samples), whichever way it was written.

    sluice: f(sample); slime: f(args, sample, **kwargs), where the sample is slime's, and args has
    no attributes but those that a reward needs of slime's (rm_type, rm_url, reward_key: all None);
    verl: f(data_source, solution_str, ground_truth, extra_info=None).
    """
    function = load(dotted)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a C function nothing is known
        return function
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return _verl(function, parameters)
    if (
        len(required := [p for p in parameters.values() if _positional(p)]) > 1
        and required[0].name == "args"
    ):
        return _slime(function)
    return function


def _slime(function: Callable[..., Any]) -> Callable[[Any], Any]:
    args = SimpleNamespace(rm_type=None, rm_url=None, reward_key=None)

    def call(sample: Any) -> Any:
        many = isinstance(sample, list)
        return function(args, [_slimes(one) for one in sample] if many else _slimes(sample))

    return call


def _slimes(sample: Any) -> Sample:
    """Slime's sample; what a generate function has set beside its fields is there again."""
    status = Status.TRUNCATED if sample.truncated else Status.COMPLETED
    names = ("prompt", "response", "label", "metadata", "tokens", "response_length")
    theirs = Sample(**{name: getattr(sample, name) for name in names}, status=status)
    for name, value in {**sample.metadata, "truncated": sample.truncated}.items():
        if not hasattr(theirs, name):
            setattr(theirs, name, value)
    return theirs


def _positional(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in (
        parameter.POSITIONAL_ONLY,
        parameter.POSITIONAL_OR_KEYWORD,
    )


def _verl(function: Callable[..., Any], parameters: Any) -> Callable[[Any], Any]:
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(sample: Any) -> Any:
        arguments = {
            "data_source": sample.metadata.get("data_source", ""),
            "solution_str": sample.response,
            "ground_truth": sample.label,
            "extra_info": sample.metadata,
        }
        return function(**{k: v for k, v in arguments.items() if takes_all or k in parameters})

    return call


def _main(functions: list[str]) -> None:
    """Print what is wrong with each function, as the last line: a JSON list, "" where nothing is.
    What modules print goes to standard error.
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
