"""The output layer of a model, and scores of its logits.

Only positions that predict a response token reach it, a chunk of them at a time: neither the logits
of a whole row (16k tokens x 152k words x 4 bytes = 10 GB) nor their gradients ever exist.
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

# Logits that exist at a time (512 MiB in float32). Larger micro-batches compute their logits again
# in the backward pass.
CHUNK_ELEMENTS = 2**27

# (logits [n, words], targets [n], hidden states of a teacher [n, ...]) -> [k, n] numbers.
Score = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# (hidden states, targets, hidden states of a teacher) of some tokens.
_Chunk = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Head:
    """An output layer, or a rank's share of its words.

    Attributes
    ----------
    weight
        [words, h].
    bias
        [words].
    float32
        Do not round logits to the precision of the weights: in bf16, logits between 16 and 32 are
        0.125 apart (MiniMax-M1, arXiv 2506.13585, section 3.2; ScaleRL, arXiv 2510.13786, figure
        5b). Weights and hidden states keep their precision.

    """

    weight: Tensor
    bias: Tensor | None = None
    float32: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits, [n, words], of hidden states, [n, h]."""
        if deterministic.enabled():
            dtype = torch.float32 if self.float32 else None
            exact: Tensor = deterministic.functions().linear(hidden, self.weight, self.bias, dtype)
            return exact
        if not self.float32:
            return F.linear(hidden, self.weight, self.bias)
        logits = _float32_product(hidden, self.weight.T)
        return logits if self.bias is None else logits + self.bias


def score_tokens(
    score: Score, hidden: Tensor, head: Head, targets: Tensor, teacher_hidden: Tensor | None = None
) -> Tensor:
    """Compute scores of the logits of an output layer, chunk by chunk.

    Gradients flow to the hidden states, weight and bias, but not to other tensors that `score`
    captures.

    Parameters
    ----------
    score
        Function of a chunk's logits.
    hidden
        [n, h], hidden states of the model.
    head
        Output layer.
    targets
        [n] int64.
    teacher_hidden
        [n, ...], hidden states of a teacher.

    Returns
    -------
    [k, n].

    """
    request = _ScoreRequest(score, targets, teacher_hidden, head.float32)
    return _apply(hidden, head.weight, head.bias, request)


@dataclass(frozen=True, slots=True)
class _ScoreRequest:
    score: Score
    targets: Tensor
    teacher_hidden: Tensor | None
    float32: bool

    def chunks(self, hidden: Tensor, words: int) -> Iterator[_Chunk]:
        """Yield all tokens in chunks of as many as `CHUNK_ELEMENTS` allows."""
        # At least one token, however large the vocabulary.
        size = max(CHUNK_ELEMENTS // words, 1)
        hiddens, targets = torch.split(hidden, size), torch.split(self.targets, size)
        teachers: tuple[Tensor, ...] | list[None] = [None] * len(targets)
        if self.teacher_hidden is not None:
            teachers = torch.split(self.teacher_hidden, size)
        return zip(hiddens, targets, teachers, strict=True)


class _Scores(torch.autograd.Function):
    """Autograd function: hidden states [n, h] and an output layer -> [k, n] scores of the logits.

    No [n, words] tensor outlives a chunk, except the logits of a single chunk, which are kept for
    the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: _ScoreRequest
    ) -> Tensor:
        head = Head(weight, bias, request.float32)
        chunks = list(request.chunks(hidden, len(weight)))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.request, ctx.kept = request, None
        # Several chunks would need too much memory: compute their logits again in backward.
        if len(chunks) > 1 or not any(ctx.needs_input_grad):
            scores = [request.score(head(h), targets, teacher) for h, targets, teacher in chunks]
            return torch.cat(scores, dim=1)
        ctx.kept = kept = _logits_and_scores(request.score, head, *chunks[0])
        return kept[1].detach()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_scores: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        hidden, weight, bias = ctx.saved_tensors
        request, head = ctx.request, Head(weight, bias, ctx.request.float32)
        # Gradients of the parameters are summed over chunks in float32.
        grad_weight = _zeros(weight) if ctx.needs_input_grad[1] else None
        grad_bias = _zeros(bias) if bias is not None else None
        grad_hidden, start = [], 0
        kept, ctx.kept = ctx.kept, None
        for chunk in request.chunks(hidden, len(weight)):
            end = start + len(chunk[0])
            logits, scores = kept or _logits_and_scores(request.score, head, *chunk)
            (gradient,) = torch.autograd.grad(scores, logits, grad_scores[:, start:end])
            # Free the chunk before the products below allocate.
            kept = logits = scores = None
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
            # Rounded to the precision of the weights, as every other gradient is.
            gradient = gradient.to(weight.dtype)
            grad_hidden.append(gradient @ weight)
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, chunk[0])
            start = end
        return torch.cat(grad_hidden), _cast(grad_weight, weight), _cast(grad_bias, bias), None


_apply: Callable[..., Tensor] = _Scores.apply


def _logits_and_scores(
    score: Score, head: Head, hidden: Tensor, targets: Tensor, teacher_hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a chunk's logits, [n, words], and its scores, [k, n], connected by autograd."""
    logits = head(hidden).requires_grad_()
    with torch.enable_grad():
        return logits, score(logits, targets, teacher_hidden)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32)


def _cast(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or parameter is None else gradient.to(parameter.dtype)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32.

    The product of two bf16 numbers is exact in float32. A GPU's matrix units for bf16 compute this
    without copies of the operands.
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
