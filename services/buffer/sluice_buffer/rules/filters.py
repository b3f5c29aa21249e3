"""Pure rules for which finished groups are worth training on.

User code never runs here: a worker applies it and reports the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np

NONZERO_STD = "nonzero_std"
_EPS = 1e-6


def nonzero_std(rewards: Sequence[float]) -> bool:
    """True if rewards differ: with equal ones every advantage is 0.

    As slime's check_reward_nonzero_std, and DAPO.
    """
    return (
        len(rewards) > 0
        and float(np.std(np.asarray(rewards, dtype=np.float64), ddof=1 if len(rewards) > 1 else 0))
        > _EPS
    )


def zero_std(rewards: Sequence[float]) -> str:
    """Return the reason in slime's words: `zero_std_1.0`.

    Only usual rewards are named, because each name is a counter.
    """
    reward = rewards[0] if rewards else 0.0
    return f"zero_std_{reward:.1f}" if -1 <= reward <= 1 else "zero_std"


def counter_name(reason: str) -> str:
    """Return a reason as part of a counter's name.

    Names are few and short, without text that differs from prompt to prompt.
    """
    if re.fullmatch(r"zero_std(_-?[01]\.\d)?", reason):
        return reason
    words = "".join(c if c.isalpha() and c.isascii() else " " for c in reason.lower()).split()
    return "_".join(words[:4])[:40] or "unnamed"


def worker_filter(metadata_json: str) -> str | None:
    """Return why the worker's filter dropped the group; None if it did not.

    The reason is in the metadata of the group's first sample.
    """
    if '"filtered"' not in metadata_json:
        return None
    metadata = json.loads(metadata_json)
    reason = metadata.get("filtered") if isinstance(metadata, dict) else None
    return str(reason)[:200] if reason else None


def dynamic_filter(
    name: str | None, rewards: Sequence[float], seat_rewards: Sequence[Mapping[str, float]] = ()
) -> str | None:
    """Return why the built-in filter drops a group; None if it keeps it.

    If the job has seats, a group is kept if the rewards of one seat differ, as each seat is
    compared with itself only.

    Parameters
    ----------
    name
        Name of the filter; None if the job has no built-in one.
    rewards
        Reward of each sample.
    seat_rewards
        Rewards of each sample by seat. A sample without one, as a failed sample, counts as 0.

    """
    seats = sorted({seat for rewards_by_seat in seat_rewards for seat in rewards_by_seat})
    by_seat = [[sample.get(seat, 0.0) for sample in seat_rewards] for seat in seats]
    learnable = any(map(nonzero_std, by_seat)) if seats else nonzero_std(rewards)
    return zero_std(rewards) if name == NONZERO_STD and not learnable else None
