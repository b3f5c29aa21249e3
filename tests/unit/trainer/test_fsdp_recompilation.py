"""Layers with sliding windows are compiled once per kind and mode, for all lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch._dynamo.utils import counters

from sluice_trainer.fsdp.attention import PACKED_ATTENTION
from sluice_trainer.fsdp.row import row
from sluice_trainer.kernels import flash_attention

WINDOW = 16
KINDS_AND_MODES = 4  # sliding and full attention, each with and without gradients


def attend_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute `flash_attention.attend2` in plain torch.

    Its kernel needs a GPU, its guards do not.
    """
    places = torch.arange(q.shape[0])
    sequence = torch.searchsorted(starts[0].long(), places, right=True)
    distance = places[:, None] - places[None]
    seen = (sequence[:, None] == sequence[None]) & (distance >= 0) & (distance < longest[0])
    if window is not None:
        seen &= distance < window
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=seen[None, None],
        scale=scale,
    )
    return out[0].transpose(0, 1)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Six layers of Gemma 3, every third with full attention, compiled as in the trainer."""
    monkeypatch.setattr(flash_attention, "attend2", attend_on_cpu)
    torch._dynamo.reset()
    counters.clear()  # `reset` keeps the counts of other tests in this process
    config = transformers.Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=50,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    config._attn_implementation = PACKED_ATTENTION
    gemma = transformers.AutoModelForCausalLM.from_config(config).eval()
    for layer in gemma.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend="eager")
    yield gemma
    torch._dynamo.reset()


def step(model: Any, lengths: list[int]) -> None:
    """Run a pass without gradients, as for log-probs, and one with them."""
    packed = row(lengths, torch.device("cpu")).arguments(PACKED_ATTENTION)
    tokens = torch.arange(sum(lengths))[None] % 50
    with torch.no_grad():
        model.model(tokens, **packed)
    model.model(tokens, **packed).last_hidden_state.sum().backward()


def test_rows_that_outgrow_the_window_do_not_recompile_layers(model: Any) -> None:
    step(model, [5, 9])
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == KINDS_AND_MODES
    for lengths in ([12, 3], [WINDOW, 2], [WINDOW + 1, 7], [30, 40], [10, 50, 3], [128, 20], [300]):
        step(model, lengths)
    assert counters["stats"]["unique_graphs"] == compiled
