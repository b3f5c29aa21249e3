"""Sequences end to end in one row, as transformers' models are told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class Row:
    """positions: [t] int64, each token's place in its sequence; lengths: of the sequences.

    starts: [sequences + 1] int32, where they begin, and the end of the last.
    """

    positions: Tensor
    lengths: tuple[int, ...]
    starts: Tensor

    def arguments(self, attention: str) -> dict[str, Any]:
        """Arguments of a model besides its tokens.

        A mask is made of positions that begin anew; FlashAttention is told the sequences' ends.
        """
        known: dict[str, Any] = {"position_ids": self.positions[None], "use_cache": False}
        if attention in ("sdpa", "eager"):
            return known
        longest = max(self.lengths)
        return known | {
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def row(lengths: list[int], device: torch.device) -> Row:
    """The row of sequences of these lengths."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - sizes, sizes)
    starts = F.pad(ends, (1, 0)).to(device, torch.int32)
    return Row(positions.to(device), tuple(lengths), starts)
