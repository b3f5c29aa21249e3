"""Commands that play environments of Gymnasium's interface: in an interpreter that has them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from sluice.api.environment import Gym

_PROGRAM = Path(__file__).with_name("gym_play.py")


def command(gym: Gym, what: Literal["check", "play"]) -> list[str]:
    """The words that do this with the environment."""
    python = gym.python or sys.executable
    # -P: what lies beside the program has the names of other modules.
    return [python, "-P", str(_PROGRAM), what, json.dumps(_config(gym))]


def _config(gym: Gym) -> dict[str, Any]:
    """The environment as its program reads it. Files by their whole paths: each episode has a
    working directory of its own.
    """
    config = gym.model_dump(mode="json", by_alias=True, exclude={"python"})
    files = {name: _here(config[name]) for name in ("make", "function") if config[name]}
    return config | files


def _here(dotted: str) -> str:
    file, _, name = dotted.rpartition(":")
    return f"{Path(file).absolute()}:{name}" if file.endswith(".py") else dotted
