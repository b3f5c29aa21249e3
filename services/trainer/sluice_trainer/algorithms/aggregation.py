"""From a value per token to one number, independent of micro-batches and ranks.

Every aggregation is a weighted sum over tokens. The weights need only the token's own sequence and the totals of the
whole optimizer step, so micro-batches and ranks simply add up: no averages of averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["sequence_mean", "token_mean", "token_sum"]


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """What one optimizer step holds, over all ranks.

    sequences: all of them, also those without an unmasked token. tokens: unmasked response tokens.
    """

    sequences: int
    tokens: int


def token_weights(mask: Tensor, sequence: Tensor, totals: BatchTotals, aggregation: Aggregation) -> Tensor:
    """Weights w such that the aggregate of x over the optimizer step is the sum of w * x over all its tokens.

    sequence_mean: mean over a sequence's unmasked tokens, then over sequences (GRPO; slime's default). A sequence
    without an unmasked token adds 0 but counts as a sequence. token_mean: mean over all unmasked tokens (DAPO).
    token_sum: sum over a sequence's unmasked tokens, then mean over sequences (Dr. GRPO; verl `seq-mean-token-sum`).

    mask: [tokens] 0 or 1; sequence: [tokens] int, which sequence of the micro-batch a token belongs to. All tokens of a
    sequence must be in the same call. Returns [tokens] float32.
    """
    mask = mask.float()
    match aggregation:
        case "sequence_mean":
            size = int(sequence.max()) + 1 if sequence.numel() else 0
            unmasked = mask.new_zeros(size).index_add_(0, sequence, mask).clamp(min=1)
            return mask / (unmasked[sequence] * max(totals.sequences, 1))
        case "token_mean":
            return mask / max(totals.tokens, 1)
        case "token_sum":
            return mask / max(totals.sequences, 1)
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}")


def metric_aggregation(aggregation: Aggregation) -> Aggregation:
    """Metrics are means: a fraction summed over the tokens of a sequence would not be one."""
    return "token_mean" if aggregation == "token_sum" else aggregation


def reduce_tokens(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of w * x over tokens of weight above 0: a masked token's value does not count even where it is infinite."""
    return torch.where(weights > 0, values * weights, 0.0).sum()
