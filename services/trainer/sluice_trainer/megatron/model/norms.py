"""RMSNorm in the form that Megatron's layers expect."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sluice_trainer.model import deterministic


class Norm(torch.nn.RMSNorm):
    """RMSNorm that supports sequence parallelism, which Megatron's `WrappedTorchNorm` refuses.

    With sequence parallelism the gradient of its weight must be all-reduced over tensor-parallel
    ranks; `finalize_model_grads` looks for the mark on the weight.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron's mark, unknown to torch
        self.epsilon = eps
        self._deterministic = config.deterministic_mode

    def forward(self, x: Tensor) -> Tensor:
        if self._deterministic:
            return deterministic.rms_norm(x, self.weight, self.epsilon)
        return super().forward(x)


class HeadNorm(Norm):
    """A norm of queries or keys that `PackedAttention` applies together with the rotation.

    As a layer of Megatron's it is the identity.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x

    def normalised(self, x: Tensor) -> Tensor:
        """Apply the norm."""
        return super().forward(x)
