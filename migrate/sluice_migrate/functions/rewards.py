"""Reward functions of slime and verl as functions of sluice's sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from sluice_migrate.stubs.slime.types import Sample, Status

Reward = Callable[[Any], Any]


def slime_reward(function: Callable[..., Any]) -> Reward | None:
    """Adapt slime's `f(args, sample, **kwargs)`; None if the function has another form.

    `sample` is slime's. `args` has the attributes that a reward function of slime reads: rm_type,
    rm_url and reward_key, all None.
    """
    required = [p for p in _parameters(function).values() if _is_required(p)]
    if len(required) < 2 or required[0].name != "args":
        return None
    args = SimpleNamespace(rm_type=None, rm_url=None, reward_key=None)

    def call(sample: Any) -> Any:
        if isinstance(sample, list):
            return function(args, [_slime_sample(member) for member in sample])
        return function(args, _slime_sample(sample))

    return call


def _slime_sample(sample: Any) -> Sample:
    """Convert a sample; attributes that a generate function added come from its metadata."""
    status = Status.TRUNCATED if sample.truncated else Status.COMPLETED
    names = ("prompt", "response", "label", "metadata", "tokens", "response_length")
    converted = Sample(**{name: getattr(sample, name) for name in names}, status=status)
    for name, value in {**sample.metadata, "truncated": sample.truncated}.items():
        if not hasattr(converted, name):
            setattr(converted, name, value)
    return converted


def verl_reward(function: Callable[..., Any]) -> Reward | None:
    """Adapt verl's `f(data_source, solution_str, ground_truth, extra_info=None)`.

    None if the function has another form. It gets those of the four arguments that it takes.
    """
    parameters = _parameters(function)
    if not {"solution_str", "ground_truth"} <= parameters.keys():
        return None
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


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function written in C may have no signature
        return {}


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in (
        parameter.POSITIONAL_ONLY,
        parameter.POSITIONAL_OR_KEYWORD,
    )
