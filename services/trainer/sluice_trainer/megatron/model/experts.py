"""The experts of a mixture, all of them in two matrix products instead of two each."""

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
    """Megatron's experts, one module each, computed together by torch's grouped matrix product.

    An expert keeps its own weights, so that checkpoints and conversion know nothing of this. Those
    of a model that learns lie side by side in Megatron's buffers, and so do their gradients: both
    are used in place. Others are put side by side in each pass. Experts run one after another in
    float32, and for tokens without a row.
    """

    local_experts: torch.nn.ModuleList

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.local_experts = _ReversedModuleList(self.local_experts)
        self._places: dict[str, _StackedWeights] = {}

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, Any]:
        """hidden: [n, h], by expert; tokens_per_expert: how many each has; probs: [n]. Gives [n, h]
        and no bias.
        """
        if hidden.dtype != torch.bfloat16 or not len(hidden) or self.num_local_experts == 1:
            result: tuple[Tensor, Any] = super().forward(hidden, tokens_per_expert, probs)
            return result
        ends = torch.cumsum(tokens_per_expert, 0).to(hidden.device, torch.int32)
        inner = _gated(self._product(hidden, "linear_fc1", ends), probs)
        return self._product(inner, "linear_fc2", ends), None

    def _product(self, rows: Tensor, name: str, ends: Tensor) -> Tensor:
        """[n, in] -> [n, out], each row by its expert's weight. ends: [experts], after each one's
        rows.
        """
        place = self._places.get(name)
        if place is None or not place.holds():
            weights = [getattr(expert, name).weight for expert in self.local_experts]
            place = self._places[name] = _StackedWeights(weights)
        if place.gradients is not None and torch.is_grad_enabled() and rows.requires_grad:
            return _grouped(rows, place.weights, place.gradients, ends)
        return F.grouped_mm(rows, place.stacked().transpose(1, 2), offs=ends)


class _ReversedModuleList(torch.nn.ModuleList):
    """A list of modules of which the last one's parameters come first where all are named.

    Megatron's buffers have parameters from the last one to the first, and so these in the order of
    the list.
    """

    def __init__(self, modules: torch.nn.ModuleList) -> None:
        super().__init__(modules)
        self._modules = dict(reversed(self._modules.items()))

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (self[index] for index in range(len(self)))


class _StackedWeights:
    """Weights of one shape [out, in]: as one tensor [experts, out, in] where they lie so already.

    weights: that tensor, without a gradient; None: each has memory of its own. gradients:
    Megatron's sums of their gradients, likewise; None: they do not learn, or not in Megatron's DDP.
    """

    def __init__(self, each: list[Tensor]) -> None:
        self._each = each
        self._first = each[0].untyped_storage()._cdata, each[0].storage_offset()
        self.weights = _as_one([weight.detach() for weight in each])
        sums = [getattr(weight, "main_grad", None) for weight in each if weight.requires_grad]
        known = [total for total in sums if total is not None]
        self.gradients = (
            _as_one(known) if self.weights is not None and len(known) == len(each) else None
        )

    def holds(self) -> bool:
        """False after the weights have come into other memory."""
        first = self._each[0]
        return self._first == (first.untyped_storage()._cdata, first.storage_offset()) and (
            self.gradients is not None or not hasattr(first, "main_grad")
        )

    def stacked(self) -> Tensor:
        """With the weights' gradients, where they have some that are not added in place."""
        learns = torch.is_grad_enabled() and self._each[0].requires_grad
        return torch.stack(self._each) if self.weights is None or learns else self.weights


def _as_one(tensors: list[Tensor]) -> Tensor | None:
    """A view of tensors of one shape that lie in one memory at equal distances, in this order;
    None where they do not.
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
    """A grouped product whose weights' gradients are added to their float32 sums at once: one
    expert after another they are thousands of additions, longer to start than to compute.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, sums: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.weights, ctx.sums = weights, sums  # not saved: optimizers and others change both
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of: Tensor) -> tuple[Tensor, None, None, None]:
        rows, ends = ctx.saved_tensors
        of = of.contiguous()
        ctx.sums.add_(F.grouped_mm(of.t(), rows, offs=ends))
        return F.grouped_mm(of, ctx.weights, offs=ends), None, None, None


def _gated(up: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU of [n, 2 f], times each token's weight for its expert [n]: [n, f]."""
    if COMPILED and up.is_cuda:
        return feed_forward.gated(up, weights)
    gate, value = up.float().chunk(2, dim=-1)
    return (F.silu(gate) * value * weights[:, None]).to(up.dtype)


_grouped: Callable[..., Tensor] = _Grouped.apply
