"""Rewards that depend on how long a response is."""

from __future__ import annotations

from torch import Tensor


def overlong_reward(lengths: Tensor, *, longest: int, buffer: int, penalty: float) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13; verl's `overlong_buffer_cfg`).

    0 up to longest - buffer tokens, from there on falling in a straight line to -penalty at
    `longest`. lengths: [samples] int, tokens of the responses, those of tools included. Returns
    [samples] float32.
    """
    over = (lengths.float() - (longest - buffer)) / buffer
    return -penalty * over.clamp(0, 1)
