"""A family that would be computed wrong is refused before it trains."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.fsdp.learner import compute
from sluice_trainer.fsdp.net import Net, forward, forward_plain
from sluice_trainer.fsdp.row import row
from sluice_trainer.model.unsupported import UnsupportedModelError
from sluice_trainer.step.packing import Forward, packed_row

_LENGTHS = (24, 40)
_EXACT = 1e-3
"""Mean distance of log-probs that rounding explains in every precision."""


def check_log_probs(net: Net, precision: torch.dtype, seed: int) -> None:
    """Compare packed log-probs with those of transformers' own logits, a sequence at a time.

    Raises UnsupportedModelError where they differ: the family does something with packed sequences
    or behind its output layer that is not known here. In bf16 rounding alone moves log-probs, the
    more the larger a model's logits are: there they may be apart by half of what it changes when
    one sequence really continues the other. Collective.
    """
    random = np.random.default_rng(seed)
    words = net.head.out_features
    first, second = (random.integers(0, words, n).astype(np.int32) for n in _LENGTHS)
    alone = [_plain(net, [Sequence(each, len(each) - 1)]) for each in (first, second)]
    shard = [Sequence(each, len(each) - 1) for each in (first, second)]
    packed = _packed(net, shard) if net.packs else torch.cat([_packed(net, [s]) for s in shard])
    continued = _plain(net, [Sequence(np.concatenate((first, second)), len(second) - 1)])
    limit = _EXACT
    if precision != torch.float32:
        limit = max(limit, _distance(continued, alone[1]) / 2)
    distance = _distance(packed, torch.cat(alone))
    if not distance <= limit:
        raise UnsupportedModelError(
            f"model_type {net.model.config.model_type!r} is not supported by trainer.backend: "
            f"fsdp: its log-probs differ by {distance:.3g} from those of transformers' own logits"
        )


def _packed(net: Net, sequences: list[Sequence]) -> Tensor:
    return _log_probs(net, sequences, partial(forward, temperature=1.0))


def _plain(net: Net, sequences: list[Sequence]) -> Tensor:
    tokens = [torch.from_numpy(s.tokens.astype(np.int64)).to(DEVICE) for s in sequences]
    return _log_probs(net, sequences, partial(forward_plain, sequences=tokens))


def _log_probs(net: Net, sequences: list[Sequence], numbers: Forward) -> Tensor:
    """Of one row, [r]."""
    batch = packed_row(sequences, range(len(sequences)), DEVICE, partial(row, device=DEVICE))
    return torch.cat(compute(net, [batch], numbers)[0])


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())
