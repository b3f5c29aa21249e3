"""Rotary embedding: rotation of queries and keys by position (RoFormer, Su et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sluice_trainer.kernels.compiled import compiled


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation speed of each pair of channels.

    inverse: [dim / 2] float32. interleaved: pairs are neighbours (GLM-4).
    """

    inverse: Tensor
    interleaved: bool = False

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for each token and pair of channels, [t, dim / 2] float32 each."""
        angles = positions.float()[:, None] * self.inverse
        return angles.cos(), angles.sin()


@compiled
def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `dim` channels of [t, heads, d] in float32. cos, sin: [t, dim / 2]."""
    dim = 2 * cos.shape[-1]
    rotating = x[..., :dim].float()
    a, b = (rotating[..., 0::2], rotating[..., 1::2]) if interleaved else rotating.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    pairs = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., dim:]), dim=-1)


class LatentRotary(torch.nn.Module):
    """Replaces Megatron's rotary embedding in latent attention, which rotates by itself."""

    def __init__(self, inverse: Tensor) -> None:
        super().__init__()
        # Not a buffer: conversion of the model to bf16 must not change it.
        self.inverse = inverse

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        config: Any,
        packed_seq_params: Any,
    ) -> Tensor:
        """Return what Megatron passes to `forward`.

        The tokens' positions in their sequences, [t].
        """
        positions: Tensor = packed_seq_params.positions
        return positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """Return angles [t, 1, dim] float32."""
        angles = positions.float()[:, None] * self.inverse
        return torch.cat((angles, angles), -1)[:, None, :]
