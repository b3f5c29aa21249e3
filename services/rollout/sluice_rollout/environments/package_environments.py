"""Environments that are Python packages, each with the interpreter that plays them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.api.groups.environment import Gym, Verifiers
from sluice_rollout.environments.fork_server_supervisor import ForkServerSupervisor

_GYM_MODULE = Path(__file__).with_name("gym_play.py")
_VERIFIERS_MODULE = Path(__file__).with_name("verifiers_play.py")


def gym_fork_server(
    gym: Gym, python: str, variables: Mapping[str, str], *, images: bool = False
) -> ForkServerSupervisor:
    """Make the fork server of an environment with Gymnasium's interface.

    `images` is true if the job's model gets images.
    """
    config = json.dumps(_gym_config(gym) | {"images": images})
    return ForkServerSupervisor(f"gym {gym.id or gym.make}", python, _GYM_MODULE, config, variables)


def _gym_config(gym: Gym) -> dict[str, Any]:
    config = gym.model_dump(mode="json", by_alias=True, exclude={"python"})
    files = {name: _absolute(config[name]) for name in ("make", "function") if config[name]}
    return config | files


def _absolute(dotted: str) -> str:
    """Make the path in `file.py:name` absolute: episodes run in other directories."""
    file, _, name = dotted.rpartition(":")
    return f"{Path(file).absolute()}:{name}" if file.endswith(".py") else dotted


def verifiers_fork_server(
    verifiers: Verifiers, python: str, variables: Mapping[str, str]
) -> ForkServerSupervisor:
    """Make the fork server of an environment of verifiers."""
    config = json.dumps(_verifiers_config(verifiers))
    name = f"verifiers {verifiers.name}"
    return ForkServerSupervisor(name, python, _VERIFIERS_MODULE, config, variables)


def verifiers_rows_command(verifiers: Verifiers) -> list[str]:
    """Return the command that writes the environment's tasks as rows."""
    python = verifiers.python or sys.executable
    # -P: modules in the script's folder must not shadow others.
    command = [python, "-P", str(_VERIFIERS_MODULE), "rows"]
    return [*command, json.dumps(_verifiers_config(verifiers))]


def _verifiers_config(verifiers: Verifiers) -> dict[str, Any]:
    """Return the configuration in verifiers' own form."""
    taskset = verifiers.args.get("taskset", {})
    return {**verifiers.args, "taskset": {**taskset, "id": verifiers.name}}
