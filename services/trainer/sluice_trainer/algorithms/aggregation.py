"""From a value per token to one number, independent of micro-batches and ranks.

Every aggregation is a weighted sum over tokens. The weights need only the token's own sequence and
the totals of the whole optimizer step, so micro-batches and ranks simply add up: no averages of
averages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sluice.api.groups.estimators import Aggregation as Aggregation


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """The content of one optimizer step, over all ranks.

    sequences: samples, with or without an unmasked token; one with branches counts once. tokens:
    unmasked response tokens.
    longest: tokens that a response may have (`maxResponseTokens`); only token_sum_norm looks at it.
    prompts: group id -> unmasked response tokens; only prompt_mean looks at it.
    """

    sequences: int
    tokens: int
    longest: int = 1
    prompts: Mapping[int, int] = field(default_factory=dict)


def token_weights(
    mask: Tensor,
    sequence: Tensor,
    totals: BatchTotals,
    aggregation: Aggregation,
    groups: Sequence[int] = (),
    elsewhere: Sequence[int] = (),
) -> Tensor:
    """Weights w such that the aggregate of x over the optimizer step is the sum of w * x over all
    its tokens.

    sequence_mean: mean over a sequence's unmasked tokens, then over sequences (GRPO; slime's
    default). A sequence without an unmasked token adds 0 but counts as a sequence. prompt_mean:
    mean over all unmasked tokens of a prompt's responses, then over prompts, so that each prompt
    weighs the same however long its answers are (ScaleRL, Khatri et al. 2025). token_mean: mean
    over all unmasked tokens (DAPO). token_sum: sum over a sequence's unmasked tokens, then mean
    over sequences (verl `seq-mean-token-sum`). token_sum_norm: that, divided by the tokens that a
    response may have: a constant, so that length weighs nothing (Dr. GRPO, Liu et al. 2025; verl
    `seq-mean-token-sum-norm`).

    mask: [tokens] 0 or 1; sequence: [tokens] int, which sequence of the micro-batch a token belongs
    to; groups: the group id of each of these sequences, for prompt_mean; elsewhere: unmasked tokens
    in other branches of each one's sample, for sequence_mean: branches are one sequence here,
    wherever they lie. All tokens of a sequence must be in the same call. Returns [tokens] float32.
    """
    mask = mask.float()
    match aggregation:
        case "sequence_mean":
            size = int(sequence.max()) + 1 if sequence.numel() else 0
            others = mask.new_tensor(elsewhere[:size] or [0.0] * size)
            unmasked = others.index_add_(0, sequence, mask).clamp(min=1)
            return mask / (unmasked[sequence] * max(totals.sequences, 1))
        case "prompt_mean":
            share = mask.new_tensor([totals.prompts[group] for group in groups]).clamp(min=1)
            return mask / (share[sequence] * max(len(totals.prompts), 1))
        case "token_mean":
            return mask / max(totals.tokens, 1)
        case "token_sum":
            return mask / max(totals.sequences, 1)
        case "token_sum_norm":
            return mask / (max(totals.sequences, 1) * totals.longest)
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}")


def metric_aggregation(aggregation: Aggregation) -> Aggregation:
    """Metrics are means: a fraction summed over the tokens of a sequence would not be one."""
    return "token_mean" if aggregation in ("token_sum", "token_sum_norm") else aggregation


def sequence_sum(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Sum over the unmasked tokens of each token's sequence. All [tokens]; a masked value may be
    anything.

    All tokens of a sequence must be in the same call. Gradients flow through the values.
    """
    size = int(sequence.max()) + 1 if sequence.numel() else 0
    return values.new_zeros(size).index_add(0, sequence, torch.where(mask > 0, values, 0.0))[
        sequence
    ]


def sequence_average(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Mean over the unmasked tokens of each token's sequence; 0 where it has none. All [tokens]."""
    counts = sequence_sum((mask > 0).to(values.dtype), mask, sequence)
    return sequence_sum(values, mask, sequence) / counts.clamp(min=1)


def reduce_tokens(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of w * x over tokens of weight above 0: a masked token's value does not count even where
    it is infinite.
    """
    return torch.where(weights > 0, values * weights, 0.0).sum()
