"""Environments, and translations to text, for tests of `rollout.environment.gym`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy


class Echo:
    """An environment of texts without spaces, which imports no package. It ends at `stop`."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"{self.greeting}, seed {seed}, options {options}", {"suffix": "Speak."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "fail":
            raise RuntimeError("the lake is on fire")
        return f"heard {action}", 0.5, action == "stop", action == "enough", {}


class Camera(gymnasium.Env[Any, Any]):
    """An environment whose observations are pictures."""

    observation_space = gymnasium.spaces.Box(0, 255, (32, 32, 3), numpy.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}


class Easel(Camera):
    """An environment of numbers, which draws itself."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return 3, {}

    def render(self) -> Any:
        return self.observation_space.sample()


class Lens:
    """Two halves of a picture, each with a name."""

    def __init__(self, env: Any) -> None:
        pass

    def observation(self, observation: Any, info: dict[str, Any]) -> list[Any]:
        return ["left:", observation[:, :16], "right:", observation[:, 16:]]


class Compass:
    """Positions and points of the compass, as texts for FrozenLake."""

    def __init__(self, env: Any) -> None:
        self.columns = env.unwrapped.ncol

    def observation(self, observation: int, info: dict[str, Any]) -> str:
        return f"row {observation // self.columns} column {observation % self.columns}"

    def action(self, answer: str) -> int:
        if answer not in "WSEN":
            raise ValueError(f"{answer} is no point of the compass")
        return "WSEN".index(answer)


class Silent:
    """An object without observation() or action()."""

    def __init__(self, env: Any) -> None:
        pass


class Anything:
    """Observations in words of the tests' model, such as `w0008`; every answer is an action."""

    def __init__(self, env: Any) -> None:
        pass

    def observation(self, observation: int, info: dict[str, Any]) -> str:
        return f"w{8 + 3 * observation:04d}"

    def action(self, answer: str) -> int:
        return len(answer) % 6
