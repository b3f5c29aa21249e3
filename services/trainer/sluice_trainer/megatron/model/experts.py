"""The experts of a mixture, all of them in two matrix products instead of two each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from sluice_trainer.compiled import compiled


@compiled
def _gated(up: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU of [n, 2 f], times each token's weight for its expert [n]: [n, f]."""
    gate, value = up.float().chunk(2, dim=-1)
    return (F.silu(gate) * value * weights[:, None]).to(up.dtype)


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's experts, one module each, computed together by torch's grouped matrix product on a
    GPU.

    An expert keeps its own weights, so that checkpoints and conversion know nothing of this: they
    are put side by side in each pass, which costs a copy of the layer's weights (0.2 ms for 128 of
    Qwen3-30B-A3B's) and saves a launch for each expert. On the CPU, and in float32, experts run one
    after another.
    """

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, Any]:
        """hidden: [n, h], by expert; tokens_per_expert: how many each has; probs: [n]. Gives [n, h]
        and no bias.
        """
        if (
            not hidden.is_cuda
            or hidden.dtype != torch.bfloat16
            or not len(hidden)
            or self.num_local_experts == 1
        ):
            result: tuple[Tensor, Any] = super().forward(hidden, tokens_per_expert, probs)
            return result
        ends = torch.cumsum(tokens_per_expert, 0).to(hidden.device, torch.int32)
        first, second = (
            torch.stack([getattr(expert, name).weight for expert in self.local_experts]).transpose(
                1, 2
            )
            for name in ("linear_fc1", "linear_fc2")
        )
        inner = _gated(F.grouped_mm(hidden, first, offs=ends), probs)
        return F.grouped_mm(inner, second, offs=ends), None
