"""Environments of verifiers, as an interpreter that has them plays them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.api.groups.environment import Verifiers
from sluice_rollout.environments.forking import Forking

_MODULE = Path(__file__).with_name("verifiers_play.py")


def forking(verifiers: Verifiers, python: str, variables: Mapping[str, str]) -> Forking:
    """The interpreter of its episodes. python: as it is found here."""
    config = json.dumps(_config(verifiers))
    return Forking(f"verifiers {verifiers.name}", python, _MODULE, config, variables)


def rows(verifiers: Verifiers) -> list[str]:
    """The words that write the environment's tasks."""
    python = verifiers.python or sys.executable
    # -P: what lies beside the module has the names of other modules.
    return [python, "-P", str(_MODULE), "rows", json.dumps(_config(verifiers))]


def _config(verifiers: Verifiers) -> dict[str, Any]:
    """The environment's configuration in verifiers' own form."""
    taskset = verifiers.args.get("taskset", {})
    return {**verifiers.args, "taskset": {**taskset, "id": verifiers.name}}
