"""What a trainer process does with images: decoding, vision towers, and how often caches help."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ImageCounts:
    """The work of one process in a step.

    Attributes
    ----------
    placed
        Images of the sequences, one for each place.
    needed
        Images that forward passes needed, each once per row.
    decoded
        Those that no cache had, so that their files were decoded and scaled.
    decode_seconds, tower_seconds
        Time of that, and of the forward passes of vision towers.
    tower_flops
        Operations of towers and projectors, forward and backward.

    """

    placed: int = 0
    needed: int = 0
    decoded: int = 0
    decode_seconds: float = 0.0
    tower_seconds: float = 0.0
    tower_flops: float = 0.0


class ImageWork:
    """Counts the work of this process since it was last taken."""

    def __init__(self) -> None:
        self.counts = ImageCounts()
        # Start and end of each tower's pass on a GPU, whose time is known once it has run.
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count one image that is decoded in this block, and its time."""
        started = time.perf_counter()
        yield
        self.counts.decode_seconds += time.perf_counter() - started
        self.counts.decoded += 1

    @contextmanager
    def tower_pass(self, device: torch.device) -> Iterator[None]:
        """Count the time of a tower's forward pass in this block."""
        if device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            yield
            end.record()
            self._passes.append((start, end))
        else:
            started = time.perf_counter()
            yield
            self.counts.tower_seconds += time.perf_counter() - started

    def take(self) -> ImageCounts:
        """Return the counts, and begin again at 0."""
        counts, self.counts = self.counts, ImageCounts()
        for start, end in self._passes:
            end.synchronize()
            counts.tower_seconds += start.elapsed_time(end) / 1000  # from milliseconds
        self._passes.clear()
        return counts


def image_metrics(ranks: Sequence[ImageCounts]) -> dict[str, float]:
    """Return the metrics of a step's images from the counts of all ranks.

    Times are those of the slowest rank. A cache hit is an image that a pass needed and that was not
    decoded for it.
    """
    needed = sum(counts.needed for counts in ranks)
    metrics = {
        "rollout/images": float(sum(counts.placed for counts in ranks)),
        "perf/image_decode_time": max(counts.decode_seconds for counts in ranks),
        "perf/tower_time": max(counts.tower_seconds for counts in ranks),
    }
    if needed:
        decoded = sum(counts.decoded for counts in ranks)
        metrics["perf/image_cache_hit_ratio"] = 1 - decoded / needed
    return metrics
