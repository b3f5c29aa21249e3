"""Buckets: named tensors in one flat buffer (SGLang's `flattened_bucket`) for one broadcast."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sluice.engines.protocol import Layout

# A tensor that may be divided comes in parts of at most 1/_PART of a bucket. So buckets are filled
# almost completely; each one costs an engine milliseconds in addition to its bytes.
_PART = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """The raw bytes of several tensors, concatenated without padding.

    Attributes
    ----------
    names, dtypes, shapes
        Of each tensor as in the Hugging Face checkpoint, in the order of the bytes.
    data
        [bytes] uint8.
    last
        True for the last bucket of an update.
    number
        Position in the update, from 0.
    ready
        On a GPU, the event after which `data` is filled.

    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: Tensor
    last: bool
    number: int = 0
    ready: torch.cuda.Event | None = None

    def stream_after_fill(self) -> AbstractContextManager[object]:
        """Enter a stream that waits until this bucket is filled, but not for later buckets."""
        if self.ready is None:
            return nullcontext()
        stream = _sending(self.data.device)
        stream.wait_event(self.ready)
        return torch.cuda.stream(stream)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as views of the bytes (copies if the bytes are not aligned)."""
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
    """Return the stream on which broadcasts wait for their buckets."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def buckets(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int, layout: Layout
) -> Iterator[Bucket]:
    """Fill buckets of at most `max_bytes`, in order; the last one is marked.

    A larger tensor gets a bucket alone.

    Parameters
    ----------
    tensors
        Names and full tensors.
    max_bytes
        Limit of a bucket, in bytes.
    layout
        The engine's layout: which tensors may be divided, and which must stay together.

    Returns
    -------
    The buckets, each made when the iterator reaches it.

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
    """Copy tensors into one buffer, without waiting for a GPU.

    All copies are one call: each separate call would compete for Python's interpreter lock with the
    threads that send.
    """
    device = tensors[0][1].device if tensors else torch.device("cpu")
    sizes = [tensor.nbytes for _, tensor in tensors]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if tensors:
        parts = zip(data.split_with_sizes(sizes), tensors, strict=True)
        pairs = (_copy_operands(part, tensor) for part, (_, tensor) in parts)
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)
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


def _copy_operands(part: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return matching views of a tensor's bytes in the bucket and of the tensor itself.

    The bytes `part` may not be aligned to the tensor's element size; then both views are bytes.
    """
    if part.storage_offset() % tensor.itemsize:
        return part, tensor.contiguous().view(-1).view(torch.uint8)
    return part.view(tensor.dtype).view(tensor.shape), tensor
