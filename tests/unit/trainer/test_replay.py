"""Experts that an engine chose, in place of those that the router would choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.megatron.model.layout import RowSplit
from sluice_trainer.megatron.model.replay import ExpertReplay
from sluice_trainer.megatron.step.learner import micro_batch

CPU = torch.device("cpu")
SCORES = torch.tensor([[0.1, 0.4, 0.2, 0.3]])


def top(scores: torch.Tensor, count: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    best = scores.topk(count, dim=1)
    return best.values, best.indices


@pytest.mark.parametrize(
    ("chosen", "experts"),
    [
        pytest.param(None, [1, 3], id="none recorded"),
        pytest.param([2, 0], [2, 0], id="other experts than the router's"),
        pytest.param([-1, -1], [1, 3], id="none for this token"),
        pytest.param([0, 0], [1, 3], id="the same expert twice"),
        pytest.param([0, 4], [1, 3], id="no such expert"),
    ],
)
def test_a_token_goes_where_the_engine_sent_it(
    chosen: list[int] | None, experts: list[int]
) -> None:
    replay = ExpertReplay()
    replay.chosen = None if chosen is None else torch.tensor([chosen])
    scores, numbers = replay.get_replay_topk(SCORES, 2, None, None, top)
    assert numbers.tolist() == [experts]
    assert torch.equal(scores, SCORES[:, experts])


def sequence(tokens: int, first: int, rows: int | None) -> Sequence:
    experts = None if rows is None else np.arange(first, first + rows, dtype=np.uint8)[:, None]
    return Sequence(np.zeros(tokens, np.int32), 1, experts=experts)


def test_experts_of_a_row_are_in_the_order_of_its_tokens() -> None:
    shard = [sequence(4, 10, 3), sequence(3, 0, None), sequence(5, 20, 2)]
    batch = micro_batch(shard, [0, 1, 2], CPU)
    assert batch.experts is not None
    assert batch.experts[:, 0].tolist() == [10, 11, 12, -1, -1, 20, 21, -1, -1]
    assert batch.packing.experts is batch.experts


def test_a_share_of_a_row_has_the_experts_of_its_tokens() -> None:
    batch = micro_batch([sequence(8, 10, 7)], [0], CPU, split=RowSplit(context=2, rank=1))
    assert batch.experts is not None
    assert batch.experts[:, 0].tolist() == [12, 13, 14, 15]


def test_a_row_without_experts_has_none() -> None:
    assert micro_batch([sequence(4, 0, None)], [0], CPU).experts is None


def test_experts_of_two_different_models_are_refused() -> None:
    other = Sequence(np.zeros(3, np.int32), 1, experts=np.zeros((2, 5), np.uint8))
    with pytest.raises(ValueError, match=r"experts of a token in one step: \[1, 5\]"):
        micro_batch([sequence(4, 0, 3), other], [0, 1], CPU)
