"""The experts of a mixture, computed in two grouped matrix products instead of two per expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from sluice_trainer.kernels import feed_forward
from sluice_trainer.kernels.compiled import COMPILED


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's separate expert modules, computed together by torch's grouped matrix product.

    Each expert keeps its weights, so checkpoints and conversion are unaffected. The weights of a
    model that learns are adjacent in Megatron's buffers, and so are their gradients; both are used
    in place. So are frozen weights after `join_frozen_weights`. Other weights are stacked in each
    pass. In float32, and for an empty row, experts run one after another.
    """

    local_experts: torch.nn.ModuleList

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.local_experts = _ReversedModuleList(self.local_experts)
        self._stacks: dict[str, _StackedWeights] = {}

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, Any]:
        """Return the experts' outputs [n, h], and no bias.

        Parameters
        ----------
        hidden
            [n, h], sorted by expert.
        tokens_per_expert
            Number of rows of each expert.
        probs
            [n], weight of each row.

        """
        if hidden.dtype != torch.bfloat16 or not len(hidden) or self.num_local_experts == 1:
            result: tuple[Tensor, Any] = super().forward(hidden, tokens_per_expert, probs)
            return result
        ends = torch.cumsum(tokens_per_expert, 0).to(hidden.device, torch.int32)
        inner = _gated(self._product(hidden, "linear_fc1", ends), probs)
        return self._product(inner, "linear_fc2", ends), None

    def join_frozen_weights(self) -> None:
        """Move the experts' weights, which do not learn, to adjacent memory.

        A backward pass through weights that are stacked for it keeps all of these copies.
        """
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, name).weight for expert in self.local_experts]
            joined = torch.stack([weight.detach() for weight in weights])
            for weight, place in zip(weights, joined, strict=True):
                weight.data = place

    def _product(self, rows: Tensor, name: str, ends: Tensor) -> Tensor:
        """Multiply each row by its expert's weight: [n, in] -> [n, out].

        ends: [experts], end of each expert's rows.
        """
        stack = self._stacks.get(name)
        if stack is None or not stack.is_valid():
            weights = [getattr(expert, name).weight for expert in self.local_experts]
            stack = self._stacks[name] = _StackedWeights(weights)
        if stack.gradients is not None and torch.is_grad_enabled() and rows.requires_grad:
            return _grouped(rows, stack.weights, stack.gradients, ends)
        return F.grouped_mm(rows, stack.stacked().transpose(1, 2), offs=ends)


class _ReversedModuleList(torch.nn.ModuleList):
    """A module list that registers its modules in reverse order.

    Megatron's buffers hold parameters from the last to the first, so they hold those of the experts
    in the order of the list.
    """

    def __init__(self, modules: torch.nn.ModuleList) -> None:
        super().__init__(modules)
        self._modules = dict(reversed(self._modules.items()))

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (self[index] for index in range(len(self)))


class _StackedWeights:
    """Weights of one shape [out, in], as one tensor if their memory is adjacent.

    Attributes
    ----------
    weights
        [experts, out, in] without gradient; None: each weight has separate memory.
    gradients
        Megatron's float32 sums of their gradients, stacked likewise; None: the weights do not
        learn, or are not in Megatron's DDP.

    """

    def __init__(self, weights: list[Tensor]) -> None:
        self._parameters = weights
        self._first = weights[0].untyped_storage()._cdata, weights[0].storage_offset()
        self.weights = _as_one([weight.detach() for weight in weights])
        sums = [getattr(weight, "main_grad", None) for weight in weights if weight.requires_grad]
        present = [total for total in sums if total is not None]
        self.gradients = (
            _as_one(present) if self.weights is not None and len(present) == len(weights) else None
        )

    def is_valid(self) -> bool:
        """Return False once the weights have moved to other memory."""
        first = self._parameters[0]
        return self._first == (first.untyped_storage()._cdata, first.storage_offset()) and (
            self.gradients is not None or not hasattr(first, "main_grad")
        )

    def stacked(self) -> Tensor:
        """Return the stack, with the weights' gradients if those are not added in place."""
        learns = torch.is_grad_enabled() and self._parameters[0].requires_grad
        return torch.stack(self._parameters) if self.weights is None or learns else self.weights


def _as_one(tensors: list[Tensor]) -> Tensor | None:
    """Return a view of equally spaced tensors of one shape in one storage, in this order.

    None if they are not.
    """
    first, storage = tensors[0], tensors[0].untyped_storage()._cdata
    distance = tensors[1].storage_offset() - first.storage_offset()
    alike = all(
        tensor.is_contiguous()
        and tensor.untyped_storage()._cdata == storage
        and tensor.storage_offset() == first.storage_offset() + number * distance
        for number, tensor in enumerate(tensors)
    )
    if not alike or distance < first.numel():
        return None
    return first.as_strided(
        (len(tensors), *first.shape), (distance, *first.stride()), first.storage_offset()
    )


class _Grouped(torch.autograd.Function):
    """A grouped product that adds its weights' gradients to their float32 sums at once.

    One expert after another these are thousands of additions, which take longer to launch than to
    compute.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, sums: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        # Not saved for backward: optimizers change both in place.
        ctx.weights, ctx.sums = weights, sums
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, ends = ctx.saved_tensors
        grad = grad.contiguous()
        ctx.sums.add_(F.grouped_mm(grad.t(), rows, offs=ends))
        return F.grouped_mm(grad, ctx.weights, offs=ends), None, None, None


def _gated(up: Tensor, weights: Tensor) -> Tensor:
    """Return SwiGLU of [n, 2 f], times each row's expert weight [n]: [n, f]."""
    if COMPILED and up.is_cuda:
        return feed_forward.gated(up, weights)
    gate, value = up.float().chunk(2, dim=-1)
    return (F.silu(gate) * value * weights[:, None]).to(up.dtype)


_grouped: Callable[..., Tensor] = _Grouped.apply
