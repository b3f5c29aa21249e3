"""`trainer.deterministic` on a GPU: reproducible results that equal the engine's.

Forward passes use the engine's functions (`sluice.numerics.invariant`), so log-probs equal the
engine's bit for bit. Backward passes use torch's with a fixed order of summation, so a run that
resumes from a checkpoint gets the same weights as without the restart. The mode is torch's
(`torch.use_deterministic_algorithms`) and holds for the whole process. On a CPU the usual functions
agree up to rounding, and are reproducible already.
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
    """Turn the mode on for this process.

    Must be called before anything is computed on the GPU, because cuBLAS reads its variable once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Uninitialized memory is never read here, so filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def enabled() -> bool:
    """Return whether the trainer computes with the engine's functions."""
    return DEVICE.type == "cuda" and torch.are_deterministic_algorithms_enabled()


def functions() -> ModuleType:
    """Return the module of the engine's functions.

    They need Triton, which a trainer without a GPU may lack.
    """
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = rows.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(0) if ctx.biased else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        result: Tensor = functions().rms_norm(x, weight, eps)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = F.rms_norm(x, weight.shape, weight, ctx.eps)
        grad_x, grad_weight = torch.autograd.grad(result, (x, weight), grad)
        return grad_x, grad_weight, None


class _Attention(torch.autograd.Function):
    """Autograd function: exact attention, with the gradient of `usual`.

    `usual` computes the same up to rounding, once more in the backward pass.
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.usual(*inputs)
        with _strictly():
            grad_q, grad_k, grad_v = torch.autograd.grad(result, inputs, grad)
        return grad_q, grad_k, grad_v, None, None


@contextmanager
def _strictly() -> Iterator[None]:
    """Turn warnings into errors, because FlashAttention is only then reproducible."""
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


_linear: Callable[..., Tensor] = _Linear.apply
_norm: Callable[..., Tensor] = _Norm.apply
_attention: Callable[..., Tensor] = _Attention.apply


def linear(*, weight: Tensor, bias: Tensor | None = None, **others: Any) -> Tensor:
    """Compute `input` [..., k] times weight [n, k], + bias [n], in place of Megatron's function.

    Megatron's other arguments concern ranks that share a matrix, which this mode does not have.
    """
    return _linear(others["input"], weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, weight, eps)


def attention(q: Tensor, k: Tensor, v: Tensor, *, exact: Attention, usual: Attention) -> Tensor:
    """Compute exact(q, k, v), with the gradient of usual(q, k, v)."""
    return _attention(q, k, v, exact, usual)
