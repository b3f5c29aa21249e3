"""Named tensors -> flat buckets (SGLang's `flattened_bucket`): one broadcast for many tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.engines.base import Layout


@dataclass(frozen=True, slots=True)
class Bucket:
    """The raw bytes of several tensors, one after the other, without padding.

    data: [bytes] uint8. names, dtypes and shapes are those of the Hugging Face checkpoint, in the
    order of the bytes.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: Tensor
    last: bool

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors again, as views of the bytes (copies where the bytes are not aligned)."""
        start = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            kind: torch.dtype = getattr(torch, dtype)
            size = kind.itemsize * torch.Size(shape).numel()
            piece = self.data[start : start + size]
            aligned = piece if start % kind.itemsize == 0 else piece.clone()
            yield name, aligned.view(kind).view(shape)
            start += size


def buckets(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int, layout: Layout
) -> Iterator[Bucket]:
    """Fill buckets of at most `max_bytes`, in order; what is larger has one of its own. The last
    one is marked.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for together in layout.inseparable(layout.in_parts(tensors, max_bytes)):
        more = sum(tensor.nbytes for _, tensor in together)
        if pending and size + more > max_bytes:
            yield _flatten(pending, last=False)
            pending, size = [], 0
        pending += together
        size += more
    yield _flatten(pending, last=True)


def _flatten(tensors: list[tuple[str, Tensor]], *, last: bool) -> Bucket:
    """Copy into one buffer: one copy a tensor, at the speed of the memory; nothing waits for a
    GPU.
    """
    device = tensors[0][1].device if tensors else torch.device("cpu")
    data = torch.empty(sum(t.nbytes for _, t in tensors), dtype=torch.uint8, device=device)
    start = 0
    for _, tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        data[start : start + flat.numel()].copy_(flat)
        start += flat.numel()
    return Bucket(
        names=tuple(name for name, _ in tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for _, t in tensors),
        shapes=tuple(tuple(t.shape) for _, t in tensors),
        data=data,
        last=last,
    )
