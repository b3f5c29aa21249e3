"""Which finished groups are worth training on. Pure; user code never runs here: a worker applies it
and tells us.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np

NONZERO_STD = "nonzero_std"
_EPS = 1e-6


def nonzero_std(rewards: Sequence[float]) -> bool:
    """Keep groups whose rewards differ: equal ones have advantage 0 (slime:
    check_reward_nonzero_std; DAPO).
    """
    return (
        len(rewards) > 0
        and float(np.std(np.asarray(rewards, dtype=np.float64), ddof=1 if len(rewards) > 1 else 0))
        > _EPS
    )


def zero_std(rewards: Sequence[float]) -> str:
    """The reason, as slime words it: `zero_std_1.0`.

    Only usual rewards are named: each name is a counter.
    """
    reward = rewards[0] if rewards else 0.0
    return f"zero_std_{reward:.1f}" if -1 <= reward <= 1 else "zero_std"


def counter_name(reason: str) -> str:
    """A reason as part of a counter's name:
    few, short, without what differs from prompt to prompt.
    """
    if re.fullmatch(r"zero_std(_-?[01]\.\d)?", reason):
        return reason
    words = "".join(c if c.isalpha() and c.isascii() else " " for c in reason.lower()).split()
    return "_".join(words[:4])[:40] or "unnamed"


def worker_filter(metadata_json: str) -> str | None:
    """The reason for which the worker's own filter dropped the group
    (first sample's metadata), or None.
    """
    if '"filtered"' not in metadata_json:
        return None
    metadata = json.loads(metadata_json)
    reason = metadata.get("filtered") if isinstance(metadata, dict) else None
    return str(reason)[:200] if reason else None


def dynamic_filter(
    name: str | None, rewards: Sequence[float], seat_rewards: Sequence[Mapping[str, float]] = ()
) -> str | None:
    """The reason for which the built-in filter `name` drops the group, or None where
    it keeps it.

    rewards: of the samples. seat_rewards: of their seats, where the job has any: a group is kept
    where the rewards of one seat differ, as each is compared with itself. A sample without one, as
    a failed one, counts as 0.
    """
    seats = sorted({seat for of_sample in seat_rewards for seat in of_sample})
    of_seats = [[one.get(seat, 0.0) for one in seat_rewards] for seat in seats]
    learnable = any(map(nonzero_std, of_seats)) if seats else nonzero_std(rewards)
    return zero_std(rewards) if name == NONZERO_STD and not learnable else None
