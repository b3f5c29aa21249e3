"""The routes that weights take from one trainer rank to its share of the engines.

Sent to one engine after another, N engines cost N transfers over the same link. In a chain each
engine passes on what it has to the next one, piece by piece: N engines cost one transfer and N - 1
pieces.

In a tree of two branches an engine sends everything twice, so it costs two transfers and some 2
log2(N) pieces: with many hundreds of engines a tree is faster. But who has 1,000 engines has dozens
of trainer ranks, each with a chain of its own, so there are chains alone. `benchmarks/fan_out.py`
computes the times of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

LARGEST_PIECE = 256 << 20


def in_order(known: Sequence[str], engines: Collection[str]) -> list[str]:
    """All engines in the order of their chain: the known ones as they were, then those that are new
    in this update. So who comes or goes costs one or two new links, and all others stay.
    """
    return [*known, *sorted(set(engines) - set(known))]


def upstream(order: Sequence[str], passes_on: Collection[str]) -> dict[str, str]:
    """The engine that passes weights on to an engine, by its name. Engines that are not in it get
    them from the trainer.

    order: of all engines. passes_on: those of this update that can be in a chain.
    """
    chain = [name for name in order if name in passes_on]
    return dict(zip(chain[1:], chain, strict=False))


def behind(name: str, upstream: dict[str, str]) -> list[str]:
    """The engines that get what this one passes on, the next one first."""
    downstream = {before: engine for engine, before in upstream.items()}
    engines = []
    while name := downstream.get(name, ""):
        engines.append(name)
    return engines


def piece_bytes(engines: int) -> int:
    """Bytes of the pieces in which a chain of so many engines passes a bucket on.

    Each engine after the first costs the time of a piece, and each piece 0.13 ms of an engine's
    Python (three engines: 60, 63 and 72 ms with 256, 128 and 64 MiB). So the best size falls with
    the square root of the number of engines.
    """
    return int(LARGEST_PIECE * min(1.0, 2 / math.sqrt(max(engines, 1))))
