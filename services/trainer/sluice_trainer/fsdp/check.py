"""A family that would be computed wrong is refused before it trains."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from sluice_trainer.device import DEVICE
from sluice_trainer.fsdp.learner import compute
from sluice_trainer.fsdp.net import Net, forward, forward_plain
from sluice_trainer.fsdp.row import row
from sluice_trainer.sequences import Sequence
from sluice_trainer.step.packing import packed_row
from sluice_trainer.unsupported import UnsupportedModelError

_LENGTHS = (24, 40)
_MOST = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean distance of log-probs that rounding explains."""


def check_log_probs(net: Net, precision: torch.dtype, seed: int) -> None:
    """Compare packed log-probs with those of transformers' own logits, a sequence at a time.

    Raises UnsupportedModelError where they differ: the family does something with packed sequences
    or behind its output layer that is not known here. Collective.
    """
    random = np.random.default_rng(seed)
    words = net.head.out_features
    tokens = [random.integers(0, words, length).astype(np.int32) for length in _LENGTHS]
    together = [range(len(tokens))] if net.packs else [[i] for i in range(len(tokens))]
    shard = [Sequence(each, len(each) - 1) for each in tokens]
    worst = 0.0
    for members in together:
        batch = packed_row(shard, list(members), DEVICE, partial(row, device=DEVICE))
        sequences = [torch.from_numpy(tokens[i].astype(np.int64)).to(DEVICE) for i in members]
        plain = partial(forward_plain, sequences=sequences)
        ours = torch.cat(compute(net, [batch], partial(forward, temperature=1.0))[0])
        theirs = torch.cat(compute(net, [batch], plain)[0])
        worst = max(worst, float((ours - theirs).abs().mean()))
    if not worst <= _MOST[precision]:
        raise UnsupportedModelError(
            f"model_type {net.model.config.model_type!r} is not supported by trainer.backend: "
            f"fsdp: its log-probs differ by {worst:.3g} from those of transformers' own logits"
        )
