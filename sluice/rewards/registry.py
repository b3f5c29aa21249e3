"""The rewards that come with sluice, by the name that `reward.type` and a row's `metadata.rm_type` use."""

from __future__ import annotations

from sluice.rewards.contains import contains
from sluice.rewards.exact_match import exact_match
from sluice.rewards.f1 import f1
from sluice.rewards.types import RewardError, RewardFunction

builtin: dict[str, RewardFunction] = {"exact_match": exact_match, "contains": contains, "f1": f1}


def lookup(name: str) -> RewardFunction:
    if name not in builtin:
        raise RewardError(f"no reward is called {name!r}; there are {', '.join(sorted(builtin))}")
    return builtin[name]
