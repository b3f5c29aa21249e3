"""`trainer.deterministic` on a GPU: the trainer computes as its engine does, and twice the same.

Forward passes use the functions that the engine uses too (`sluice.numerics.invariant`),
so that log-probs are the engine's to the bit. Backward passes use torch's, told to add in an order
that it repeats, so that a run that goes on from a checkpoint gets the weights that it would have
had without. The switch is torch's own (`torch.use_deterministic_algorithms`): it belongs to the
process. On a CPU the usual functions are exact to rounding, and repeat themselves already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sluice_trainer.distributed.device import DEVICE

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def enable() -> None:
    """From here on. Before anything is computed on the GPU: cuBLAS reads its variable once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Memory that nobody has written is read by nobody here: filling it only costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def enabled() -> bool:
    """True where the trainer computes with the engine's functions."""
    return DEVICE.type == "cuda" and torch.are_deterministic_algorithms_enabled()


def functions() -> ModuleType:
    """Those of the engine. They need Triton, which a trainer without a GPU may not have."""
    from sluice.numerics import invariant

    return invariant


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        result: Tensor = functions().linear(x, weight, bias)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = of.reshape(-1, of.shape[-1])
        of_x = of @ weight if ctx.needs_input_grad[0] else None
        of_weight = rows.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(0) if ctx.biased else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        result: Tensor = functions().rms_norm(x, weight, eps)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = F.rms_norm(x, weight.shape, weight, ctx.eps)
        of_x, of_weight = torch.autograd.grad(result, (x, weight), of)
        return of_x, of_weight, None


class _Attention(torch.autograd.Function):
    """The gradient is that of `usual`, which computes the same up to rounding: once more in the
    backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exact: Attention, usual: Attention
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.usual = usual
        return exact(q, k, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.usual(*inputs)
        with _strictly():
            of_q, of_k, of_v = torch.autograd.grad(result, inputs, of)
        return of_q, of_k, of_v, None, None


@contextmanager
def _strictly() -> Iterator[None]:
    """Where torch only warns of what it does not repeat, FlashAttention does not repeat itself."""
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


_linear: Callable[..., Tensor] = _Linear.apply
_norm: Callable[..., Tensor] = _Norm.apply
_attention: Callable[..., Tensor] = _Attention.apply


def linear(*, weight: Tensor, bias: Tensor | None = None, **others: Any) -> Tensor:
    """`input` [..., k] times weight [n, k], + bias [n]. Stands for Megatron's product, by its
    names; what Megatron says besides is about ranks that share a matrix, and here none do.
    """
    return _linear(others["input"], weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, weight, eps)


def attention(q: Tensor, k: Tensor, v: Tensor, *, exact: Attention, usual: Attention) -> Tensor:
    """exact(q, k, v), with the gradient of usual(q, k, v)."""
    return _attention(q, k, v, exact, usual)
