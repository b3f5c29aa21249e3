"""Commands that play environments of verifiers: in an interpreter that has them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from sluice.api.environment import Verifiers

_PROGRAM = Path(__file__).with_name("verifiers_play.py")


def command(verifiers: Verifiers, what: Literal["rows", "check", "play"]) -> list[str]:
    """The words that do this with the environment."""
    python = verifiers.python or sys.executable
    # -P: what lies beside the program has the names of other modules.
    return [python, "-P", str(_PROGRAM), what, json.dumps(_config(verifiers))]


def _config(verifiers: Verifiers) -> dict[str, Any]:
    """The environment's configuration in verifiers' own form."""
    taskset = verifiers.args.get("taskset", {})
    return {**verifiers.args, "taskset": {**taskset, "id": verifiers.name}}
