"""Arguments of engines' command lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.api import RLJobSpec
from sluice.api.groups.engine_args import kebab


def normalized(args: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments by one spelling each.

    `memFractionStatic`, `mem_fraction_static` and `mem-fraction-static` are one argument.
    """
    return {aliases.get(name := kebab(key), name): value for key, value in args.items()}


def brought_by_trainer(spec: RLJobSpec) -> bool:
    """Return True if no engine needs to read the weights of the language model.

    The trainer sends them before the first request, and many engines would read the same files at
    once. A trainer that sends adapters alone does not send the model. If a checkpoint has other
    parts, the engine's launch script reads it nevertheless.
    """
    if spec.weight_sync.lora == "adapter":
        return False
    return not spec.debug.rollout_only or spec.model.init == "random"
