"""A row of concatenated sequences, as transformers' models expect it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_trainer.batch.images import PlacedImage
from sluice_trainer.fsdp.row_images import RowImages, row_images
from sluice_trainer.fsdp.row_share import RowShare


@dataclass(slots=True)
class Row:
    """Positions and bounds of the sequences in a row.

    Attributes
    ----------
    positions
        [t] int64, position of each token in its sequence; of this rank's tokens if ranks share the
        row.
    lengths
        Lengths of the sequences.
    starts
        [sequences + 1] int32, starts of the sequences and the end of the last one.
    images
        The images in the row; None if it has none.
    share
        This rank's position among those that share the row; None: it has all of it.

    """

    positions: Tensor
    lengths: tuple[int, ...]
    starts: Tensor
    images: RowImages | None = None
    share: RowShare | None = None

    def arguments(self, attention: str) -> dict[str, Any]:
        """Return the arguments of a model call in addition to its tokens.

        Masks are derived from positions that restart at 0; FlashAttention is given the bounds of
        the sequences.
        """
        common: dict[str, Any] = {"position_ids": self.positions[None], "use_cache": False}
        if attention in ("sdpa", "eager"):
            return common
        longest = max(self.lengths)
        return common | {
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": longest,
            "max_length_k": longest,
            "row_share": self.share,
        }


def row(
    lengths: list[int],
    device: torch.device,
    images: Seq[Seq[PlacedImage]] = (),
    share: RowShare | None = None,
) -> Row:
    """Return the row of sequences of these lengths.

    images: those of each sequence; the last sequences may be left out. share: this rank's position
    among those that share the row; None: it has all tokens.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - sizes, sizes)
    if share is not None:
        positions = positions[share.held(len(positions))]
    starts = F.pad(ends, (1, 0)).to(device, torch.int32)
    placed = row_images(lengths, images, device) if any(images) else None
    return Row(positions.to(device), tuple(lengths), starts, placed, share)
