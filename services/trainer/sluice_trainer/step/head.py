"""The output layer of a model, and what is asked of its logits.

Only places that predict a response token reach it, and only a chunk of them at a time: the logits
of a whole row (16k tokens x 152k words x 4 bytes = 10 GB) never exist, nor do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sluice_trainer.model import deterministic

CHUNK_ELEMENTS = 2**27
"""Logits that exist at a time (512 MiB in float32). Larger micro-batches compute theirs again in
the backward pass."""


@dataclass(frozen=True, slots=True)
class Head:
    """An output layer, or a rank's share of its words.

    weight: [words, h]; bias: [words]. float32: logits that are not rounded to the weights'
    precision: in bf16 they lie 0.125 apart between 16 and 32 (MiniMax-M1, arXiv 2506.13585, section
    3.2; ScaleRL, arXiv 2510.13786, figure 5b). Weights and states stay as they are.
    """

    weight: Tensor
    bias: Tensor | None = None
    float32: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, h] -> [n, words] logits."""
        if deterministic.enabled():
            dtype = torch.float32 if self.float32 else None
            exact: Tensor = deterministic.functions().linear(hidden, self.weight, self.bias, dtype)
            return exact
        if not self.float32:
            return F.linear(hidden, self.weight, self.bias)
        logits = _float32_product(hidden, self.weight.T)
        return logits if self.bias is None else logits + self.bias


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """The product a @ b in float32: of two bf16 numbers it is exact, and sums are float32.

    On a GPU the matrix units for bf16 do just that, without copies of the operands.
    """
    if _on_matrix_units(a, b):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which is float32."""
    if _on_matrix_units(a, b):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _on_matrix_units(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16


Score = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(logits [n, words], targets [n], a teacher's hidden states [n, ...]) -> [k, n] numbers."""


_Chunk = tuple[Tensor, Tensor, Tensor | None]
"""(hidden states, targets, the teacher's hidden states) of some tokens."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """score: of a chunk of the tokens. float32: as `Head` has it."""

    score: Score
    targets: Tensor
    taught: Tensor | None
    float32: bool

    def chunks(self, hidden: Tensor, words: int) -> Iterator[_Chunk]:
        """All tokens, as many at a time as `CHUNK_ELEMENTS` allows."""
        size = max(CHUNK_ELEMENTS // words, 1)
        hiddens, targets = torch.split(hidden, size), torch.split(self.targets, size)
        none: list[None] = [None] * len(targets)
        taught = none if self.taught is None else torch.split(self.taught, size)
        return zip(hiddens, targets, taught, strict=True)


class _Scores(torch.autograd.Function):
    """Hidden states [n, h] and an output layer -> [k, n] scores of its logits.

    Of [n, words] nothing outlives a chunk, but what a row of one chunk keeps for its backward pass.
    The gradient of the logits is rounded to the weights' precision before it is multiplied, as
    every other gradient; that of the weights is added up over chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked
    ) -> Tensor:
        head, chunks = Head(weight, bias, asked.float32), list(asked.chunks(hidden, len(weight)))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.asked, ctx.kept = asked, None
        if len(chunks) > 1 or not any(ctx.needs_input_grad):
            return torch.cat([asked.score(head(h), t, taught) for h, t, taught in chunks], dim=1)
        ctx.kept = kept = _scored(asked.score, head, *chunks[0])
        return kept[1].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        hidden, weight, bias = ctx.saved_tensors
        asked, head = ctx.asked, Head(weight, bias, ctx.asked.float32)
        total, of_bias = _zeros(weight, ctx.needs_input_grad[1]), _zeros(bias, bias is not None)
        of_hidden, start = [], 0
        kept, ctx.kept = ctx.kept, None
        for chunk in asked.chunks(hidden, len(weight)):
            end = start + len(chunk[0])
            logits, scores = kept or _scored(asked.score, head, *chunk)
            (gradient,) = torch.autograd.grad(scores, logits, of[:, start:end])
            kept = logits = scores = None
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=torch.float32)
            gradient = gradient.to(weight.dtype)
            of_hidden.append(gradient @ weight)
            if total is not None:
                _add_product(total, gradient.T, chunk[0])
            start = end
        return torch.cat(of_hidden), _like(total, weight), _like(of_bias, bias), None


def _scored(
    score: Score, head: Head, hidden: Tensor, targets: Tensor, taught: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits of a chunk, [n, words], and their scores, [k, n], for a gradient between the two."""
    logits = head(hidden).requires_grad_()
    with torch.enable_grad():
        return logits, score(logits, targets, taught)


def _zeros(like: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.zeros_like(like, dtype=torch.float32) if wanted and like is not None else None


def _like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or parameter is None else gradient.to(parameter.dtype)


_apply: Callable[..., Tensor] = _Scores.apply


def scores_of(
    score: Score, hidden: Tensor, head: Head, targets: Tensor, taught: Tensor | None = None
) -> Tensor:
    """[k, n] scores of the logits that an output layer gives for hidden states [n, h].

    Gradients go to the states, weight and bias, and to nothing else that `score` knows.
    """
    return _apply(hidden, head.weight, head.bias, _Asked(score, targets, taught, head.float32))
