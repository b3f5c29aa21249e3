"""Megatron's options of recomputation, which slime and verl pass on."""

from __future__ import annotations

from typing import Any, get_args

from sluice.api.groups.trainer import Recompute, RecomputeModule


def recompute(granularity: Any) -> str:
    """`trainer.recompute`. Raises ValueError."""
    kind = str(granularity or "none")
    if kind not in get_args(Recompute):
        raise ValueError(f"trainer.recompute is one of {', '.join(get_args(Recompute))}")
    return kind


def recompute_modules(words: Any) -> list[str]:
    """`trainer.recomputeModules`. Raises ValueError where a part needs TransformerEngine."""
    names = [words] if isinstance(words, str) else [*words]
    strange = [name for name in names if name not in get_args(RecomputeModule)]
    if strange or not names:
        raise ValueError(
            f"{', '.join(map(str, strange))}: trainer.recomputeModules are of "
            f"{', '.join(get_args(RecomputeModule))}"
        )
    return names
