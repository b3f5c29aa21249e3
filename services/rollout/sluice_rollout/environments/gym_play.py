"""Plays environments with Gymnasium's interface (github.com/Farama-Foundation/Gymnasium).

    python gym_play.py play CONFIG     plays an episode for row.json, and writes result.json

CONFIG is `rollout.environment.gym` as JSON, with `images`: true if the job's model gets images. A
fork server (fork_server.py) calls `load` and `play` to do the same without starting Python for each
episode.

This runs in an interpreter that has the environment and may not have sluice. It imports the modules
in its folder and the standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple


def _load_file(file: Path, name: str) -> ModuleType:
    """Import a file under a name, even if another module has that name."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from sluice_rollout.environments import gym_actions, gym_images, gym_text
    from sluice_rollout.environments.gym_images import Content
else:
    gym_actions, gym_images, gym_text = (
        _load_file(Path(__file__).with_name(f"{name}.py"), name)
        for name in ("gym_actions", "gym_images", "gym_text")
    )

RESET = "reset"  # key of a row's metadata: options of the environment's reset, such as a seed
_TOO_LONG = "context_length_exceeded"
_MOST_SEEDS = 2**32  # numpy's limit


class HistoryFullError(Exception):
    """The history does not fit the model's context."""


class LoadedEnvironment(NamedTuple):
    """An environment before its episode, and how a model sees its observations and acts."""

    env: Any
    # (observation, info) -> a text, a picture, or a list of both
    show: Callable[[Any, dict[str, Any]], Any]
    # answer -> action; raises ValueError with a message for the model
    act: Callable[[str], Any]
    action_description: str  # for the model; may be empty
    max_turns: int | None  # None: until the environment ends
    images: bool = False  # True if the model gets images


# --- loading


def load(config: dict[str, Any]) -> LoadedEnvironment:
    """Make the environment of a configuration.

    Ends the program if it cannot be made, or if a model cannot play it.
    """
    env = _environment(config)
    own = _user_object(config, env)
    images = config.get("images", False)
    show = getattr(own, "observation", None) or partial(_default_view, env, images)
    act, description = getattr(own, "action", None), ""
    names = config.get("actions")
    if act is None:
        actions = _actions(env, names)
        act, description = actions.parse, actions.description
    elif names is not None:
        raise SystemExit("gym.actions: the function has an action(): leave actions out")
    loaded = LoadedEnvironment(env, show, act, description, config.get("maxTurns"), images)
    _check(loaded)
    return loaded


def _environment(config: dict[str, Any]) -> Any:
    """Make the environment, which draws itself as text (render_mode ansi) if it can."""
    args = config.get("args") or {}
    if config.get("make"):
        name, make = config["make"], _load_named("make", config["make"])
    else:
        name, module = config["id"], config.get("module") or "gymnasium"
        make = partial(_callable("module", _import_module("module", module), "make"), name)
    try:
        env = make(**args)
        modes = (getattr(env, "metadata", None) or {}).get("render_modes") or ()
        if "ansi" in modes and "render_mode" not in args:
            env = make(**args, render_mode="ansi")
    except Exception as error:  # an environment may raise anything
        field = "make" if config.get("make") else "id"
        raise SystemExit(f"gym.{field}: {name} cannot be made: {_cause(error)}") from error
    return env


def _user_object(config: dict[str, Any], env: Any) -> Any:
    """Call the user's function, if there is one, for its observation() and action()."""
    if not config.get("function"):
        return None
    own = _load_named("function", config["function"])(env)
    if not (hasattr(own, "observation") or hasattr(own, "action")):
        raise SystemExit(
            f"gym.function: {config['function']} gave {type(own).__name__}: expected an object "
            "with observation(observation, info), action(answer), or both"
        )
    return own


def _actions(env: Any, names: list[str] | None) -> gym_actions.Actions:
    try:
        return gym_actions.actions_of(getattr(env, "action_space", None), names)
    except gym_actions.SpaceError as error:
        if names is not None:
            raise SystemExit(f"gym.actions: {error}") from error
        raise SystemExit(f"gym.function: {error}: set one that has action(answer)") from error


def _load_named(field: str, dotted: str) -> Any:
    """Load a class or function: package.module.name, package.module:name or file.py:name."""
    module, _, name = dotted.rpartition(":") if ":" in dotted else dotted.rpartition(".")
    return _callable(field, _import_module(field, module), name)


def _import_module(field: str, name: str) -> Any:
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        sys.path.append(str(Path(name).resolve().parent))  # so that it can import its neighbours
        return _load_file(Path(name), f"sluice_custom_{Path(name).stem}")
    except Exception as error:  # a module may raise anything
        raise SystemExit(
            f"gym.{field}: cannot import {name} in {sys.executable}: {_cause(error)}"
        ) from error


def _callable(field: str, module: Any, name: str) -> Any:
    if not callable(value := getattr(module, name, None)):
        raise SystemExit(f"gym.{field}: {module.__name__} has no function {name}")
    return value


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# --- observations


def _default_view(env: Any, images: bool, observation: Any, info: dict[str, Any]) -> list[Any]:
    """Return the environment's drawing or its observation.

    The info's `prefix` and `suffix` surround it (a convention of GEM).
    """
    mode = getattr(env, "render_mode", None)
    drawing = env.render() if mode == "ansi" or (images and mode == "rgb_array") else None
    view: Any
    if isinstance(drawing, str):
        view = gym_text.drawn(drawing)
    elif images and gym_images.is_picture(drawing):
        view = drawing
    elif images and gym_images.is_picture(observation):
        view = observation
    else:
        view = gym_text.shown(observation)
    before, after = (
        text.strip("\n") if isinstance(text, str) else ""
        for text in (info.get(name) for name in ("prefix", "suffix"))
    )
    if not isinstance(view, str):
        return [before, view, after]
    return ["\n".join(part for part in (before, view.strip("\n"), after) if part)]


def observation_parts(
    loaded: LoadedEnvironment, observation: Any, info: dict[str, Any]
) -> list[Any]:
    """Return an observation as texts and pictures. Ends the program if that fails."""
    try:
        view = loaded.show(observation, info)
    except gym_text.NoTextError as error:
        raise SystemExit(
            f"gym.function: {error}: set one that has observation(), or show a picture to a "
            "vision-language model with data.images: {}"
        ) from error
    parts = view if isinstance(view, list) else [view]
    for part in parts:
        if gym_images.is_picture(part):
            if not loaded.images:
                raise SystemExit(
                    "gym.function: observation() gave a picture, and the job's model gets no "
                    "images: set data.images: {}"
                )
        elif not isinstance(part, str):
            raise SystemExit(
                "gym.function: expected a text of observation(), an array [height, width, 3] of "
                f"uint8, or a list of these, found {part!r}"
            )
    return parts


def _check(loaded: LoadedEnvironment) -> None:
    """End the program if the environment cannot be reset or its observation cannot be shown."""
    try:
        observation, info = loaded.env.reset(seed=0)
    except Exception as error:  # an environment may raise anything
        raise SystemExit(f"gym: reset(seed=0) raised {_cause(error)}") from error
    observation_parts(loaded, observation, info)


# --- an episode


def play(loaded: LoadedEnvironment) -> None:
    """Play the episode of row.json, and write result.json.

    If the history becomes too long, the rewards so far are written before the program fails.
    """
    row = json.loads(Path("row.json").read_text())
    rewards: list[float] = []
    metadata: dict[str, Any] = {"steps": 0, "refused": 0, "terminated": False, "truncated": False}
    full: HistoryFullError | None = None
    try:
        _play(loaded, row, rewards, metadata)
    except HistoryFullError as error:
        full = error
    result = {"reward": 0.0, "turn_rewards": rewards, "metadata": {"gym": metadata}}
    Path("result.json").write_text(json.dumps(result))
    if full:
        raise SystemExit(f"the history does not fit: {full}")


def _play(
    loaded: LoadedEnvironment, row: dict[str, Any], rewards: list[float], metadata: dict[str, Any]
) -> None:
    """Play until the environment ends, or for maxTurns. Fills `rewards` and `metadata`."""
    env = loaded.env
    observation, info = env.reset(**reset_options(row))
    first = observation_parts(loaded, observation, info)
    messages = opening(row, first, loaded.action_description)
    while not (metadata["terminated"] or metadata["truncated"]):
        answer = ask(messages)
        messages.append(answer)
        reward, content = 0.0, gym_images.content_of([])
        try:
            action = loaded.act(answer.get("content") or "")
        except ValueError as error:
            metadata["refused"] += 1
            content = f"error: {error}"
        else:
            metadata["steps"] += 1
            observation, reward, terminated, truncated, info = env.step(action)
            metadata |= {"terminated": bool(terminated), "truncated": bool(truncated)}
            if not (terminated or truncated):
                content = gym_images.content_of(observation_parts(loaded, observation, info))
        rewards.append(float(reward))
        messages.append({"role": "user", "content": content})
        if len(rewards) == loaded.max_turns and not metadata["terminated"]:
            metadata["truncated"] = True


def reset_options(row: dict[str, Any]) -> dict[str, Any]:
    """Return the options of reset.

    All samples of a prompt have the same seed, so that they can be compared.
    """
    return {"seed": row["group"] % _MOST_SEEDS, **(row["metadata"].get(RESET) or {})}


def opening(row: dict[str, Any], observation: list[Any], description: str) -> list[dict[str, Any]]:
    """Make the first messages: the row's, with observation and actions in the user's last one."""
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    *before, last = messages
    question: Content | None = last["content"] if last.get("role") == "user" else None
    if question is None:
        question, before, last = "", messages, {"role": "user"}
    asked = question if isinstance(question, list) else [question]
    parts = [*asked, *observation, description and f"Answer with {description}."]
    return [*before, last | {"content": gym_images.content_of(parts)}]


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask the model for its message. Raises HistoryFullError.

    The request has no timeout, because the worker ends an episode that takes too long.
    """
    body = {"model": os.environ["SLUICE_MODEL"], "messages": messages}
    request = urllib.request.Request(  # noqa: S310 - the gateway's address
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # the gateway is on this machine
    try:
        with direct.open(request) as response:
            message = json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        refusal = json.load(error)["error"]
        if refusal.get("code") == _TOO_LONG:
            raise HistoryFullError(refusal["message"]) from error
        raise SystemExit(f"the gateway refuses the request: {refusal['message']}") from error
    return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}


def main(command: str, config: str) -> None:
    """Play. Output of the environment while it loads goes to standard error."""
    assert command == "play"
    with contextlib.redirect_stdout(sys.stderr):
        loaded = load(json.loads(config))
    play(loaded)


if __name__ == "__main__":
    main(*sys.argv[1:])
