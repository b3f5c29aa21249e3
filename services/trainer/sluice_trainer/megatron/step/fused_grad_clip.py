"""The norm of all gradients and their clipping, a few kernels for all of them together.

Megatron leaves both to extensions of TransformerEngine or Apex. Without them it waits for the GPU
once for each gradient and multiplies one after another: of a mixture there are thousands.
"""

from __future__ import annotations

import warnings
from itertools import chain

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale


def clip_all_at_once() -> None:
    """Let Megatron clip gradients by `norm` and `scale`, unless one of those libraries is there."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale


def norm(
    _chunk: int, _overflow: Tensor, lists: list[list[Tensor]], *_: object
) -> tuple[Tensor, None]:
    """The norm of all tensors as one vector: [1] float32, where they are."""
    return torch.nn.utils.get_total_norm(chain.from_iterable(lists)).float().view(1), None


def scale(_chunk: int, _overflow: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Multiply the tensors of the second list, which is the first one too, by the factor."""
    torch._foreach_mul_(lists[1], factor)
