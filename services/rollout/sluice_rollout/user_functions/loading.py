"""Loads all user code of a job before the engine has started, so that mistakes show at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.api import Reward, RLJobSpec
from sluice.api.groups.data import PromptSource
from sluice.rewards import RewardError
from sluice.rewards.judging.judge import Judge
from sluice.runtime import function_adapters, user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Purpose
from sluice_rollout.environments.openenv import openenv_of
from sluice_rollout.environments.pods import EpisodePods
from sluice_rollout.environments.program import Program, program_of
from sluice_rollout.episode import Play
from sluice_rollout.user_functions import filters, hooks

# `function` of a data source whose samples are one answer of the model each, whatever
# rollout.function says.
NO_FUNCTION = "none"


class SignatureError(Exception):
    """A function that cannot play an episode. The message, put after its name, says why."""


@dataclass(frozen=True, slots=True)
class EpisodeFunctions:
    """Functions, or a program, that play a job's episodes, each with its name."""

    default: tuple[str, Play] | None = None
    # Functions of data sources that name one, by purpose and source. None: no function.
    by_source: Mapping[tuple[Purpose, str], tuple[str, Play] | None] = field(default_factory=dict)

    @property
    def program(self) -> Program | None:
        """The program that plays the job's episodes, if a program does."""
        play = self.default[1] if self.default else None
        return play if isinstance(play, Program) else None


@dataclass(frozen=True, slots=True)
class UserCode:
    """The user code of a job: functions, rewards, hooks and filter."""

    # Judges training samples, and evaluation data sets that name no reward. None: no spec.reward.
    judge: Judge | None
    dataset_judges: dict[str, Judge]
    dynamic_filter: filters.Filter
    functions: EpisodeFunctions
    hooks: hooks.Hooks
    # All judges, by the field of the job that describes them.
    judges_by_field: dict[str, Judge]

    @classmethod
    def load(cls, spec: RLJobSpec, pods: EpisodePods | None = None) -> UserCode:
        """Load the code that a job names. Judges load their functions in `check`.

        Parameters
        ----------
        spec
            The job.
        pods
            Plays the job's episodes, if they run in pods.

        Raises
        ------
        ConfigurationError
            If something cannot be loaded or has the wrong signature.

        """
        dynamic_filter = filters.load(spec.rollout.dynamic_filter)
        functions = load_functions(spec, pods)
        job_hooks = hooks.load_all(spec.rollout.hooks)
        judge = Judge(spec.reward) if spec.reward else None
        by_field = {_field("spec.reward", spec.reward): judge} if spec.reward and judge else {}
        dataset_judges = {}
        for index, dataset in enumerate(spec.evaluation.datasets if spec.evaluation else []):
            if dataset.reward:
                dataset_judge = Judge(dataset.reward)
                dataset_judges[dataset.source_name] = dataset_judge
                name = f"spec.evaluation.datasets[{index}].reward"
                by_field[_field(name, dataset.reward)] = dataset_judge
        return cls(judge, dataset_judges, dynamic_filter, functions, job_hooks, by_field)

    async def check(self) -> None:
        """Try the rewards, and the program of episodes. Raises ConfigurationError."""
        if self.functions.program:
            await self.functions.program.check()
        for field_name, judge in self.judges_by_field.items():
            try:
                await judge.check()
            except RewardError as error:
                raise ConfigurationError(f"{field_name}: {error}") from error

    async def close(self) -> None:
        if self.functions.program:
            self.functions.program.close()
        for judge in self.judges_by_field.values():
            await judge.close()


def _field(name: str, reward: Reward) -> str:
    return f"{name}.function" if reward.function else name


def load_functions(spec: RLJobSpec, pods: EpisodePods | None = None) -> EpisodeFunctions:
    """Load the functions or the program of episodes. Arguments and errors as in `UserCode.load`."""
    datasets = spec.evaluation.datasets if spec.evaluation else []
    sources: list[tuple[str, Purpose, PromptSource]] = [
        *((f"spec.data.prompts[{i}]", Purpose.TRAIN, s) for i, s in enumerate(spec.data.prompts)),
        *((f"spec.evaluation.datasets[{i}]", Purpose.EVALUATE, s) for i, s in enumerate(datasets)),
    ]
    by_source = {
        (purpose, source.source_name): load_function(source.function, spec, f"{name}.function")
        for name, purpose, source in sources
        if source.function
    }
    return EpisodeFunctions(("the program", pods) if pods else _default(spec), by_source)


def _default(spec: RLJobSpec) -> tuple[str, Play] | None:
    if spec.rollout.environment is None:
        return load_function(spec.rollout.function, spec)
    if openenv := spec.rollout.environment.openenv:
        play = openenv_of(openenv, Path(spec.model.path).name)
        return play.name, play
    program = program_of(spec.rollout.environment, spec)
    return program.name, program


def load_function(
    path: str | None, spec: RLJobSpec, field_name: str = "spec.rollout.function"
) -> tuple[str, Play] | None:
    """Load a generate function by its path, with its name; None without a path.

    Raises
    ------
    ConfigurationError
        If it cannot be loaded or cannot play an episode.

    """
    if path is None or path == NO_FUNCTION:
        return None
    try:
        return path, play_of(user_code.load(path), spec)
    except user_code.LoadError as error:
        raise ConfigurationError(f"{field_name}: {error}") from error
    except SignatureError as error:
        raise ConfigurationError(f"{field_name}: {path} {error}") from error


def play_of(function: Callable[..., Any], spec: RLJobSpec) -> Play:
    """Return the function as one that takes an episode.

    Adapters convert the functions of other projects; all others are sluice's.

    Raises
    ------
    SignatureError
        The function is not async, or does not take the arguments that the job gives it.

    """
    for adapter in function_adapters.installed():
        if play := adapter.play(function, spec):
            if spec.rollout.seats:
                raise SignatureError(
                    "plays one conversation, but the job has rollout.seats: expected "
                    "`async def play(episode)`, which asks the gateway for each seat by its name"
                )
            return play
    if not _is_async(function):
        forms = [adapter.play_form for adapter in function_adapters.installed()]
        expected = " or ".join(["`async def play(episode)`", *forms])
        raise SignatureError(f"is not async: expected {expected}")
    return _with_arguments(function, spec.rollout.function_args)


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return any(inspect.iscoroutinefunction(f) for f in (function, call))


def _with_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """Add rollout.functionArgs after the episode."""
    if not arguments:
        return function
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise SignatureError(
            f"does not take what spec.rollout.functionArgs has: {error}"
        ) from error
    play = functools.partial(function, **arguments)
    play.whole_group = getattr(function, "whole_group", False)  # type: ignore[attr-defined]
    return play
