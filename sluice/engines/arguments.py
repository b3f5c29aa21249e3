"""Names of arguments as command lines have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def normalized(args: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """memFractionStatic, mem_fraction_static and mem-fraction-static are one argument."""
    return {aliases.get(name := kebab(key), name): value for key, value in args.items()}


def kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name).replace("_", "-").lower().lstrip("-")
