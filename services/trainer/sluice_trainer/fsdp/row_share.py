"""Ranks that share a row of tokens: sequence parallelism of DeepSpeed-Ulysses.

Each rank has a run of the row's tokens in all layers. Around attention the ranks exchange tokens
for heads, so that each computes some heads over the whole row (Jacobs et al. 2023,
https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from sluice_trainer.model.unsupported import UnsupportedModelError

# Position encodings that depend on the longest position in a call, which a share does not have.
_WHOLE_ROWS = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class RowShare:
    """Position of a rank among those that share its rows.

    Attributes
    ----------
    size
        Number of the ranks.
    rank
        Number of this one.
    group
        Their process group; None for one rank.

    """

    size: int = 1
    rank: int = 0
    group: Any = None

    @classmethod
    def of_process(cls, size: int, timeout: timedelta) -> RowShare:
        """Return this process's position; neighbours share rows. Collective."""
        if size == 1:
            return cls()
        starts = range(0, dist.get_world_size(), size)
        groups = [dist.new_group(range(start, start + size), timeout=timeout) for start in starts]
        return cls(size, dist.get_rank() % size, groups[dist.get_rank() // size])

    def held(self, length: int) -> Tensor:
        """Return the positions of this rank's tokens in a row, [length / size] int64."""
        part = length // self.size
        return torch.arange(self.rank * part, (self.rank + 1) * part)

    def whole_row(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Exchange tokens for heads, before attention.

        Parameters
        ----------
        query, key, value
            [s, heads, d] each, of this rank's tokens. Keys and values may have fewer heads.

        Returns
        -------
        [s x size, heads / size, d] each: some heads of all tokens.

        """
        parts = [self._by_rank(x) for x in (query, key, value)]
        heads = [part.shape[2] for part in parts]
        mixed = self._exchange(torch.cat(parts, 2).transpose(0, 1))
        return tuple(part.flatten(0, 1) for part in torch.split(mixed, heads, 2))

    def all_heads(self, output: Tensor) -> Tensor:
        """Exchange heads for tokens, after attention.

        output: [s x size, heads / size, d]. Returns [s, heads, d].
        """
        parts = output.view(self.size, -1, *output.shape[1:])
        return self._exchange(parts).transpose(0, 1).flatten(1, 2)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, on each of them.

        Every rank computes the same loss from it, and gradients of weights are summed over ranks
        afterwards, so the gradient of a rank is that of its own values.
        """
        result: Tensor = _Sum.apply(values, self.group)  # type: ignore[no-untyped-call]
        return result

    def _by_rank(self, x: Tensor) -> Tensor:
        """Return [s, size, heads / size, d]; heads of which there are too few are repeated."""
        if (heads := x.shape[1]) < self.size:
            x = x.repeat_interleave(self.size // heads, 1)
        return x.reshape(x.shape[0], self.size, -1, x.shape[2])

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i of [size, ...] to rank i. Part i of the result has come from rank i."""
        flat = parts.contiguous().flatten()
        sizes = [flat.numel() // self.size] * self.size
        received: Tensor = all_to_all_single_autograd(flat, sizes, sizes, self.group)
        return received.view(parts.shape)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def check_shareable(model: Any, size: int, *, packs: bool) -> None:
    """Check that ranks can share the rows of a model.

    Raises
    ------
    UnsupportedModelError
        The number of heads is no multiple of the number of ranks, or layers need more than
        attention needs of other tokens.

    """
    if size == 1:
        return
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    fewer = getattr(config, "num_key_value_heads", None) or heads
    problem = ""
    if not packs or not _WHOLE_ROWS.isdisjoint(_encodings(config)):
        problem = f"model_type {config.model_type!r} has layers that need whole sequences"
    elif heads % size or (fewer % size and size % fewer):
        problem = f"the model has {heads} heads and {fewer} of keys, which they cannot share"
    if problem:
        raise UnsupportedModelError(
            f"trainer.parallelism.context: {size} with backend: fsdp lets ranks compute different "
            f"heads of a sequence: {problem}: leave it out, or choose backend: megatron"
        )


def _encodings(config: Any) -> set[Any]:
    """Return the position encodings of a model, whose layers may have different ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layers = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return {entry.get("rope_type") for entry in (parameters, *of_layers)}
