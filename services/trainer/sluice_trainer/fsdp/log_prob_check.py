"""Self-check at start-up that refuses a model family whose log-probs would be wrong."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import __version__

from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.fsdp.families import is_recurrent
from sluice_trainer.fsdp.learner import compute, micro_batch
from sluice_trainer.fsdp.net import Net, forward, forward_plain
from sluice_trainer.fsdp.row import row
from sluice_trainer.model.unsupported import UnsupportedModelError
from sluice_trainer.step.packing import Forward, MicroBatch, packed_row

_LENGTHS = (24, 40)
# Tokens of a chunk in the scans of recurrent layers, if the configuration does not say.
_CHUNK = 64
# Tokens of the last chunk that are compared.
_LAST = 8
# Mean difference of log-probs that rounding explains in every precision.
_EXACT = 1e-3
# The same of two passes of one model over the same tokens, in float32.
_SAME = 1e-4


def check_log_probs(net: Net, precision: torch.dtype, seed: int) -> None:
    """Compare packed log-probs with those of transformers' own logits, one sequence at a time.

    In bf16 rounding alone changes log-probs, more so for models with larger logits. There they may
    differ by half of what changes if one sequence really continues the other. Collective.

    Parameters
    ----------
    net
        The sharded model.
    precision
        Precision of forward passes.
    seed
        Seed of the random sequences.

    Raises
    ------
    UnsupportedModelError
        If they differ: the family treats packed sequences, or the output of its last layer, in a
        way that this backend does not know.

    """
    random = np.random.default_rng(seed)
    words = net.head.out_features
    first, second = (random.integers(0, words, n).astype(np.int32) for n in _LENGTHS)
    shard = [Sequence(tokens, len(tokens) - 1) for tokens in (first, second)]
    alone = [_plain(net, [sequence]) for sequence in shard]
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
    if is_recurrent(net.model):
        _check_scan(net, _SAME if precision == torch.float32 else limit, random)


def _check_scan(net: Net, limit: float, random: np.random.Generator) -> None:
    """Check that log-probs do not depend on later tokens, over the bounds of a scan's chunks.

    transformers 5.12's scan of Mamba-2 layers in plain torch (Nemotron-H, Bamba and others) weights
    the states of earlier chunks by a sum over all chunks, so later ones change it.
    """
    config = net.model.config.get_text_config()
    chunk = getattr(config, "chunk_size", None) or _CHUNK
    whole = random.integers(0, net.head.out_features, 2 * chunk + _LAST).astype(np.int32)
    start = whole[: chunk + _LAST]
    first = _plain(net, [Sequence(start, _LAST - 1)])
    again = _plain(net, [Sequence(whole, len(whole) - 1)])[chunk : chunk + _LAST - 1]
    distance = _distance(first, again)
    if not distance <= limit:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is not supported by trainer.backend: fsdp: "
            f"transformers {__version__} computes log-probs that differ by {distance:.3g} if more "
            "tokens follow, because its scan in plain torch is wrong beyond the first chunk of "
            f"{chunk} tokens: use a trainer image with the family's kernels (mamba-ssm and "
            "causal-conv1d)"
        )


def _packed(net: Net, sequences: list[Sequence]) -> Tensor:
    batch = micro_batch(net, sequences, range(len(sequences)))
    return _log_probs(net, batch, partial(forward, temperature=1.0))


def _plain(net: Net, sequences: list[Sequence]) -> Tensor:
    tokens = [torch.from_numpy(s.tokens.astype(np.int64)).to(DEVICE) for s in sequences]
    batch = packed_row(sequences, range(len(sequences)), DEVICE, partial(row, device=DEVICE))
    return _log_probs(net, batch, partial(forward_plain, sequences=tokens))


def _log_probs(net: Net, batch: MicroBatch, numbers: Forward) -> Tensor:
    """Return the log-probs [r] of the sequences in a row."""
    return torch.cat(compute(net, [batch], numbers)[0])


def _distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().mean())
