"""Environments, and classes between them and text, that tests of `rollout.environment.gym` name."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy


class Echo:
    """Texts, and nothing but the interface: no spaces, no package. Ends at `stop`."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"{self.greeting}, seed {seed}, options {options}", {"suffix": "Speak."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "fail":
            raise RuntimeError("the lake is on fire")
        return f"heard {action}", 0.5, action == "stop", action == "enough", {}


class Camera(gymnasium.Env[Any, Any]):
    """Observations are pictures."""

    observation_space = gymnasium.spaces.Box(0, 255, (32, 32, 3), numpy.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}


class Compass:
    """Words for FrozenLake: where it is, and moves by their points of the compass."""

    def __init__(self, env: Any) -> None:
        self.columns = env.unwrapped.ncol

    def observation(self, observation: int, info: dict[str, Any]) -> str:
        return f"row {observation // self.columns} column {observation % self.columns}"

    def action(self, answer: str) -> int:
        if answer not in "WSEN":
            raise ValueError(f"{answer} is no point of the compass")
        return "WSEN".index(answer)


class Silent:
    """Neither an observation nor an action."""

    def __init__(self, env: Any) -> None:
        pass


class Anything:
    """Words that the model of the tests has, as `w0008`; and every answer is an action."""

    def __init__(self, env: Any) -> None:
        pass

    def observation(self, observation: int, info: dict[str, Any]) -> str:
        return f"w{8 + 3 * observation:04d}"

    def action(self, answer: str) -> int:
        return len(answer) % 6
