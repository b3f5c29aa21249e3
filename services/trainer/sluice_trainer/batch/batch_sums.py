"""Sums over all trained tokens of a batch, over all data-parallel ranks, and metrics of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from sluice.api import Algorithm
from sluice_trainer.algorithms.advantages import Moments, moments
from sluice_trainer.algorithms.estimators import (
    Estimate,
    Responses,
)
from sluice_trainer.algorithms.value_loss import explained_variance
from sluice_trainer.distributed.ranks import Ranks


def token_sums(responses: Responses, estimates: Estimate) -> dict[str, Moments]:
    """Sums over this rank's unmasked tokens. Equal names on all ranks, also on one that has no
    response.
    """
    mask = _joined(responses.masks)
    tokens = {"advantages": _joined(estimates.advantages), "kl": _joined(responses.kl)}
    if estimates.returns is not None and responses.values is not None:
        tokens |= {"returns": _joined(estimates.returns), "values": _joined(responses.values)}
        tokens["errors"] = tokens["returns"] - tokens["values"]
    return {name: moments(values, mask) for name, values in tokens.items()}


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(rows)) if rows else torch.empty(0)


def over_data_parallel(ranks: Ranks, moments: dict[str, Moments]) -> dict[str, Moments]:
    """Sums of all data-parallel ranks, added up in the same order on every rank. Collective."""
    of_rank = dict(ranks.gather((ranks.data_parallel_rank, moments)))
    return {
        name: reduce(add, (of_rank[rank][name] for rank in sorted(of_rank))) for name in moments
    }


def metrics(sums: dict[str, Moments], algorithm: Algorithm) -> dict[str, float]:
    """Means over the batch's trained tokens, under slime's names; and how good the critic's values
    were (verl's).
    """
    shown = [name for name in ("returns", "values") if name in sums] + (
        ["kl"] if algorithm.kl.coef > 0 or algorithm.kl.adaptive else []
    )
    result = {f"rollout/{name}": float(sums[name].mean) for name in shown}
    result["rollout/advantages"] = 0.0 if algorithm.whitens else float(sums["advantages"].mean)
    if "errors" in sums:
        result["critic/vf_explained_var"] = explained_variance(sums["returns"], sums["errors"])
    return result
