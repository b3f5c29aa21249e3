"""Scores of logits a chunk at a time, against the same by autograd over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sluice_trainer.step import head
from sluice_trainer.step.head import Head, score_tokens
from sluice_trainer.step.logits import log_probs_and_entropies

TOKENS, HIDDEN, WORDS, SCALE = 13, 24, 50, 1.25


@pytest.fixture(params=[1, 4, TOKENS, 100], ids=lambda n: f"{n} tokens a chunk")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", request.param * WORDS)
    size: int = request.param
    return size


def layer(dtype: torch.dtype, *, biased: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(hidden states, weight, bias, targets)."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(WORDS, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(WORDS, generator=generator).to(dtype) if biased else None
    return hidden, weight, bias, torch.randint(0, WORDS, (TOKENS,), generator=generator)


def score(logits: Tensor, targets: Tensor, teacher_hidden: Tensor | None) -> Tensor:
    return torch.stack(log_probs_and_entropies(logits, targets, scale=SCALE))


def written(logits: Tensor, targets: Tensor) -> Tensor:
    """[2, n] log-probs and entropies, as they are written."""
    log_p = torch.log_softmax(logits * SCALE, -1)
    return torch.stack((log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


@pytest.mark.parametrize("biased", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("float32", [False, True], ids=["as the weights", "float32"])
def test_scores_and_gradients_equal_those_of_autograd(
    chunks: int, float32: bool, biased: bool
) -> None:
    hidden, weight, bias, targets = layer(torch.float32, biased=biased)
    leaves = [leaf(parameter) for parameter in (hidden, weight, bias) if parameter is not None]
    score_grads = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(4))
    output = Head(leaves[1], leaves[2] if biased else None, float32)
    scores = score_tokens(score, leaves[0], output, targets)
    plain = [leaf(parameter.double()) for parameter in leaves]
    logits = plain[0] @ plain[1].T + (plain[2] if biased else 0.0)
    expected = written(logits, targets)
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-5)
    scores.backward(score_grads)
    expected.backward(score_grads.double())
    for ours, theirs in zip(leaves, plain, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)


def test_a_float32_head_does_not_round_logits() -> None:
    hidden, weight, _, targets = layer(torch.bfloat16, biased=False)
    exact = written(hidden.double() @ weight.double().T, targets)[0]
    errors = [
        (score_tokens(score, hidden, Head(weight, float32=f), targets)[0] - exact).abs().max()
        for f in (False, True)
    ]
    assert errors[0] > 1e-2
    assert errors[1] < 1e-5


def test_a_float32_head_leaves_gradients_in_the_precision_of_the_weights(chunks: int) -> None:
    hidden, weight, _, targets = layer(torch.bfloat16, biased=False)
    states, weights = leaf(hidden), leaf(weight)
    score_tokens(score, states, Head(weights, float32=True), targets)[0].sum().backward()
    exact = [leaf(hidden.double()), leaf(weight.double())]
    written(exact[0] @ exact[1].T, targets)[0].sum().backward()
    for ours, theirs in zip((states, weights), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        distance = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert distance < 2**-7


def test_a_frozen_weight_gets_no_gradient(chunks: int) -> None:
    hidden, weight, _, targets = layer(torch.float32, biased=False)
    states = leaf(hidden)
    score_tokens(score, states, Head(weight), targets)[0].sum().backward()
    assert weight.grad is None
    assert states.grad is not None


def test_no_tokens_have_no_scores() -> None:
    hidden, weight, _, targets = layer(torch.float32, biased=False)
    states = leaf(hidden[:0])
    scores = score_tokens(score, states, Head(weight), targets[:0])
    scores.sum().backward()
    assert scores.shape == (2, 0)
    assert states.grad is not None
