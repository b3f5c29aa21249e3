"""Named tensors -> flat buckets (SGLang's `flattened_bucket`): one broadcast for many tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sluice.engines.protocol import Layout

_PART = 4
"""What can be divided comes in parts of at most one in so many of a bucket, so that little of one
stays empty: each costs an engine milliseconds beside its bytes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The raw bytes of several tensors, one after the other, without padding.

    data: [bytes] uint8. names, dtypes and shapes are those of the Hugging Face checkpoint, in the
    order of the bytes. number: in its update, from 0. ready: on a GPU, the event behind what fills
    it.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: Tensor
    last: bool
    number: int = 0
    ready: torch.cuda.Event | None = None

    def stream_after_fill(self) -> AbstractContextManager[object]:
        """A stream for what waits for this bucket, and not for later ones that are being filled."""
        if self.ready is None:
            return nullcontext()
        stream = _sending(self.data.device)
        stream.wait_event(self.ready)
        return torch.cuda.stream(stream)

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


@cache
def _sending(device: torch.device) -> torch.cuda.Stream:
    """The stream on which broadcasts wait for their buckets."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def buckets(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int, layout: Layout
) -> Iterator[Bucket]:
    """Fill buckets of at most `max_bytes`, in order; what is larger has one of its own. The last
    one is marked.
    """
    pending: list[tuple[str, Tensor]] = []
    size, numbers = 0, itertools.count()
    for together in layout.inseparable(layout.in_parts(tensors, max_bytes // _PART)):
        more = sum(tensor.nbytes for _, tensor in together)
        if pending and size + more > max_bytes:
            yield _flatten(pending, next(numbers), last=False)
            pending, size = [], 0
        pending += together
        size += more
    yield _flatten(pending, next(numbers), last=True)


@torch.no_grad()
def _flatten(tensors: list[tuple[str, Tensor]], number: int, *, last: bool) -> Bucket:
    """Copy into one buffer, at the speed of the memory; nothing waits for a GPU. All copies are one
    call: each by itself waits for its turn in Python, beside the threads that send.
    """
    device = tensors[0][1].device if tensors else torch.device("cpu")
    sizes = [tensor.nbytes for _, tensor in tensors]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if tensors:
        parts = zip(data.split_with_sizes(sizes), tensors, strict=True)
        places, sources = zip(*(_place(part, tensor) for part, (_, tensor) in parts), strict=True)
        torch._foreach_copy_(places, sources)
    ready = torch.cuda.Event() if data.is_cuda else None  # type: ignore[no-untyped-call]
    if ready:
        ready.record(torch.cuda.current_stream(data.device))
    return Bucket(
        names=tuple(name for name, _ in tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for _, t in tensors),
        shapes=tuple(tuple(t.shape) for _, t in tensors),
        data=data,
        last=last,
        number=number,
        ready=ready,
    )


def _place(part: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor's place in a bucket, and a view of the tensor that fits it. part: the place's bytes,
    which may not be aligned to the tensor's numbers.
    """
    if part.storage_offset() % tensor.itemsize:
        return part, tensor.contiguous().view(-1).view(torch.uint8)
    return part.view(tensor.dtype).view(tensor.shape), tensor
