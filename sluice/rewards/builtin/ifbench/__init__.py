"""Instruction following, checked by programs (IFEval, IFBench; slime's `ifbench`).

A row lists its instructions in `metadata.instruction_id_list` and their arguments, one object each,
in `metadata.kwargs`. `score` is 1 if all are followed, else 0; `followed` is the share. The checks
use no tagger or word list, so they may split unusual text into sentences and words differently from
the benchmarks' code. langdetect detects languages, as in IFEval. An instruction that is not covered
(`docs/rewards.md`) fails its sample.
"""

from __future__ import annotations

import json
from typing import Any

from sluice.rewards.builtin.ifbench import counts, custom, formats, ifeval, words
from sluice.rewards.types import RewardError, RewardInput, shown

CHECKS = ifeval.CHECKS | counts.CHECKS | words.CHECKS | formats.CHECKS | custom.CHECKS


def ifbench(sample: RewardInput) -> dict[str, float]:
    names, arguments = _instructions(sample.metadata)
    followed = [
        _follows(sample.response, name, keywords)
        for name, keywords in zip(names, arguments, strict=True)
    ]
    return {"score": float(all(followed)), "followed": sum(followed) / len(followed)}


def _follows(response: str, name: str, arguments: dict[str, Any]) -> bool:
    if name not in CHECKS:
        raise RewardError(f"metadata.instruction_id_list: there is no check for {shown(name)}")
    if not response.strip():
        return False
    try:
        return CHECKS[name](response, **arguments)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise RewardError(
            f"metadata.kwargs: {name} cannot take {shown(arguments)}: {error}"
        ) from error


def _instructions(metadata: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return names and arguments of the instructions, without null arguments."""
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(names, list) or not names:
        raise RewardError(
            "metadata.instruction_id_list: ifbench needs a list of instructions, got "
            f"{shown(names)}"
        )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise RewardError(
                f"metadata.kwargs: expected a list of objects or its JSON, got {shown(arguments)}"
            ) from None
    if arguments is None or isinstance(arguments, dict):
        arguments = [arguments or {}] * len(names)
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise RewardError(
            f"metadata.kwargs: expected one object for each of {len(names)} instructions, got "
            f"{shown(arguments)}"
        )
    return [str(n).strip() for n in names], [
        {k: v for k, v in (g or {}).items() if v is not None} for g in arguments
    ]
