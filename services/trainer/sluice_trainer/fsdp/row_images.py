"""The images of a packed row: where their tokens are, and what rotary embedding sees of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sluice_trainer.batch.images import BatchImage, PlacedImage

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class RowImages:
    """The images of a row with t tokens, m of them of images.

    Attributes
    ----------
    images
        The distinct images, in the order in which the tower gets them.
    places
        [m] int64, ascending positions in the row of the tokens of images.
    features
        [m] int64, index of each in the tokens of all `images`, one after the other.
    positions
        [3, t] int64, position of each token in time, height and width.

    """

    images: list[BatchImage]
    places: Tensor
    features: Tensor
    positions: Tensor


def row_images(lengths: Seq[int], images: Seq[Seq[PlacedImage]], device: torch.device) -> RowImages:
    """Return the images of a row.

    An image that several sequences of the row have goes through the tower once.

    Parameters
    ----------
    lengths
        Lengths of the sequences in the row, of which each lacks its last token.
    images
        Images of each sequence; the last sequences may be left out.
    device
        Device of the tensors.

    """
    distinct = {placed.image.digest: placed.image for part in images for placed in part}
    counts = [image.tokens for image in distinct.values()]
    first = dict(zip(distinct, np.cumsum([0, *counts]).tolist(), strict=False))
    places, features, positions = [], [], []
    start = 0
    for number, length in enumerate(lengths):
        own = images[number] if number < len(images) else ()
        grids = [(placed.start, placed.image.rows, placed.image.columns) for placed in own]
        positions.append(rope_positions(length, grids))
        for placed in own:
            # The last token of a sequence is not in the row, and may belong to an image.
            tokens = np.arange(max(min(placed.image.tokens, length - placed.start), 0))
            places.append(start + placed.start + tokens)
            features.append(first[placed.image.digest] + tokens)
        start += length
    return RowImages(
        list(distinct.values()),
        _on(np.concatenate(places), device),
        _on(np.concatenate(features), device),
        _on(np.concatenate(positions, 1), device),
    )


def rope_positions(length: int, images: Seq[tuple[int, int, int]]) -> Int64:
    """Return the positions of a sequence's tokens in time, height and width, [3, length].

    Those of Qwen2-VL (Wang et al. 2024, section 2.1): text counts up in all three. The tokens of an
    image share one time and have the height and width of their place in the image, from the
    position of the image on; text goes on after the largest of these.

    Parameters
    ----------
    length
        Tokens of the sequence.
    images
        First token of each image, and its tokens in height and in width.

    """
    parts, at, position = [], 0, 0
    for start, rows, columns in images:
        parts.append(_text(start - at, position))
        position += start - at
        height, width = np.divmod(np.arange(rows * columns), columns)
        parts.append(np.stack((np.zeros_like(height), height, width)) + position)
        position += max(rows, columns)
        at = start + rows * columns
    parts.append(_text(max(length - at, 0), position))
    return np.concatenate(parts, 1)[:, :length]


def _text(length: int, position: int) -> Int64:
    return np.broadcast_to(np.arange(position, position + length), (3, length))


def _on(values: Int64, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
