"""Rewards that depend on the length of a response."""

from __future__ import annotations

from torch import Tensor


def overlong_reward(lengths: Tensor, *, longest: int, buffer: int, penalty: float) -> Tensor:
    """Compute the soft overlong punishment (DAPO, Yu et al. 2025, eq. 13).

    It is 0 up to longest - buffer tokens, then falls linearly to -penalty at `longest` (verl's
    `overlong_buffer_cfg`).

    Parameters
    ----------
    lengths
        [samples] int, tokens of the responses, including those of tools.
    longest
        Tokens that a response may have.
    buffer
        Tokens before `longest` in which the reward falls.
    penalty
        Largest penalty.

    Returns
    -------
    [samples] float32.

    """
    over = (lengths.float() - (longest - buffer)) / buffer
    return -penalty * over.clamp(0, 1)
