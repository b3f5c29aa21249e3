"""Two buffers for buckets of weights: one is received while the other is loaded.

Buckets are received on a stream of their own. It waits until the bucket before the last one has
been loaded, and loading waits for what is received: no process waits for the GPU. On a CPU one
thing happens after the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Buffers:
    """The two buffers of one rank of an engine."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._latest: torch.Tensor | None = None
        """The bucket that was received last: it may still be loaded."""
        self._before: tuple[torch.Tensor, Any] | None = None
        """The one before it, and the event behind what loads it."""

    @contextmanager
    def receiving(self, device: Any) -> Iterator[None]:
        """Receive a bucket by what is queued inside. What is queued afterwards waits for that."""
        if torch.device(device).type != "cuda":
            yield
            return
        loading = torch.cuda.current_stream(device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self._before is not None:
            self._stream.wait_event(self._before[1])  # its memory is this stream's again
        self._before = None
        if self._latest is not None:
            self._before = (self._latest, loading.record_event())
        with torch.cuda.stream(self._stream):
            yield
        loading.wait_stream(self._stream)

    def keep(self, data: torch.Tensor) -> None:
        """Keep the memory of a bucket that is being received until it has been loaded."""
        self._latest = data if data.is_cuda else None

    def release(self) -> None:
        """Give up the memory of both, once they have been loaded."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._latest = self._before = None
