"""Aggregation of token values to one number, independent of micro-batches and ranks.

Every aggregation is a weighted sum over tokens. A weight depends only on the token's sequence and
the totals of the whole optimizer step, so micro-batches and ranks simply add up: there are no
averages of averages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sluice.api.groups.estimators import Aggregation as Aggregation


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """The totals of one optimizer step over all ranks.

    Attributes
    ----------
    sequences
        Samples, with or without an unmasked token; a sample with branches counts once.
    tokens
        Unmasked response tokens.
    longest
        Tokens that a response may have (`maxResponseTokens`); only for token_sum_norm.
    prompts
        Group id -> unmasked response tokens; only for prompt_mean.

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
    other_tokens: Sequence[int] = (),
) -> Tensor:
    """Return weights w such that the aggregate of x over the optimizer step is the sum of w * x.

    sequence_mean: mean over a sequence's unmasked tokens, then over sequences (GRPO; slime's
    default). A sequence without an unmasked token adds 0 but counts as a sequence. prompt_mean:
    mean over all unmasked tokens of a prompt's responses, then over prompts, so that each prompt
    has the same weight whatever the length of its answers (ScaleRL, Khatri et al. 2025).
    token_mean: mean over all unmasked tokens (DAPO). token_sum: sum over a sequence's unmasked
    tokens, then mean over sequences (verl `seq-mean-token-sum`). token_sum_norm: that, divided by
    the tokens that a response may have, a constant, so that length has no influence (Dr. GRPO, Liu
    et al. 2025; verl `seq-mean-token-sum-norm`).

    Parameters
    ----------
    mask
        [tokens] 0 or 1.
    sequence
        [tokens] int, index in the micro-batch of each token's sequence. All tokens of a sequence
        must be in the same call.
    totals
        Totals of the optimizer step over all ranks.
    aggregation
        Which aggregation.
    groups
        Group id of each sequence; only for prompt_mean.
    other_tokens
        Unmasked tokens in the other branches of each sequence's sample; only for sequence_mean,
        which treats branches as one sequence, whichever micro-batch they are in.

    Returns
    -------
    [tokens] float32.

    """
    mask = mask.float()
    match aggregation:
        case "sequence_mean":
            size = int(sequence.max()) + 1 if sequence.numel() else 0
            # All branches of a sample share one denominator.
            others = mask.new_tensor(other_tokens[:size] or [0.0] * size)
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
    """Return the aggregation of metrics, which is always a mean.

    A fraction that is summed over the tokens of a sequence would not be a fraction.
    """
    return "token_mean" if aggregation in ("token_sum", "token_sum_norm") else aggregation


def sequence_sum(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Sum over the unmasked tokens of each token's sequence.

    Masked values may be infinite or nan. All tokens of a sequence must be in the same call.

    Parameters
    ----------
    values
        [tokens]; gradients flow through them.
    mask
        [tokens].
    sequence
        [tokens] int, index of each token's sequence.

    Returns
    -------
    [tokens], the sum of its sequence at each token.

    """
    size = int(sequence.max()) + 1 if sequence.numel() else 0
    return values.new_zeros(size).index_add(0, sequence, torch.where(mask > 0, values, 0.0))[
        sequence
    ]


def sequence_average(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Average over the unmasked tokens of each token's sequence; 0 if there are none."""
    counts = sequence_sum((mask > 0).to(values.dtype), mask, sequence)
    return sequence_sum(values, mask, sequence) / counts.clamp(min=1)


def reduce_tokens(values: Tensor, weights: Tensor) -> Tensor:
    """Sum w * x over the tokens with a weight above 0; other values may be infinite."""
    return torch.where(weights > 0, values * weights, 0.0).sum()
