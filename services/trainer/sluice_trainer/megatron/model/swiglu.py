"""SwiGLU of dense layers, which Megatron's fusion leaves to torch.compile: there its backward pass
took twice what reading and writing takes. Here ours stands in for it.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from sluice_trainer.kernels import feed_forward
from sluice_trainer.kernels.compiled import COMPILED

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.transformer import mlp

_of_megatron = mlp.bias_swiglu_impl


def swiglu(up: Tensor, bias: Tensor | None, *options: bool) -> Tensor:
    """[..., 2 f] -> [..., f]. options: Megatron's, for what is stored in FP8 or on the host."""
    if bias is not None or any(options) or not up.is_cuda:
        result: Tensor = _of_megatron(up, bias, *options)
        return result
    return feed_forward.gated(up.flatten(0, -2), None).view(*up.shape[:-1], -1)


def use_ours() -> None:
    """Megatron looks its function up at each call."""
    if COMPILED:
        mlp.bias_swiglu_impl = swiglu
