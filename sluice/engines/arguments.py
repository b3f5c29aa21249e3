"""Arguments of engines' command lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sluice.api import RLJobSpec
from sluice.api.groups.engine_args import kebab

# Read by the plugins: the largest rank of an adapter, how many versions of one are held, the layers
# that have one and, in a pool, how many jobs may use the engine.
ADAPTER_VARIABLE = "SLUICE_LORA"


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


def adapter_variables(spec: RLJobSpec) -> dict[str, str]:
    """Return the variable that makes the plugin serve the trainer's adapter."""
    lora = spec.trainer.lora
    if lora is None or spec.weight_sync.lora != "adapter":
        return {}
    settings = {
        "rank": lora.stored_rank,
        "versions": held_versions(spec),
        "layers": lora.adapted_names,
    }
    return {ADAPTER_VARIABLE: json.dumps(settings)}


def held_versions(spec: RLJobSpec) -> int:
    """Return the number of versions of an adapter that an engine holds; 0: one, in place."""
    return spec.rollout.max_staleness + 1 if spec.weight_sync.pause_mode == "versions" else 0
