"""Names of arguments as command lines have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sluice.api import RLJobSpec

_OF_OTHER_WEIGHTS = frozenset(
    {
        "quantization",
        "speculative-algorithm",
        "speculative-config",
        "speculative-draft-model-path",
    }
)
"""Arguments for which an engine reads more, or otherwise, than the trainer sends."""


def normalized(args: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """memFractionStatic, mem_fraction_static and mem-fraction-static are one argument."""
    return {aliases.get(name := kebab(key), name): value for key, value in args.items()}


def kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name).replace("_", "-").lower().lstrip("-")


def brought_by_trainer(spec: RLJobSpec, args: Mapping[str, Any]) -> bool:
    """True where no engine need read the model's weights: the trainer sends its own before the
    first request, so many engines would only read the same files at once.

    args: the user's, by their normalized names.
    """
    trained = not spec.debug.rollout_only and _OF_OTHER_WEIGHTS.isdisjoint(args)
    return trained or spec.model.init == "random"
