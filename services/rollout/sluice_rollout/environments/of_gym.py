"""Environments of Gymnasium's interface, as an interpreter that has them plays them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.api.groups.environment import Gym
from sluice_rollout.environments.forking import Forking

_MODULE = Path(__file__).with_name("gym_play.py")


def forking(gym: Gym, python: str, variables: Mapping[str, str]) -> Forking:
    """The interpreter of its episodes. python: as it is found here."""
    config = json.dumps(_config(gym))
    return Forking(f"gym {gym.id or gym.make}", python, _MODULE, config, variables)


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
