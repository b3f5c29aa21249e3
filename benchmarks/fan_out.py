"""Weights from one trainer rank to many engines, on paper: one after another, a chain, a tree.

    python benchmarks/fan_out.py [--bandwidth GB/s] [--piece-us MICROSECONDS]

Nothing is measured here. The figures come from the time that one transfer takes (`weight_sync.py`
prints it as `bare`), from what a piece costs beside its moving, and from the order in which buckets
and pieces go, which is that of `sluice_trainer/weights/chain.py`: a bucket goes in pieces, each of
which an engine passes on as soon as it has it, and the trainer begins a bucket once all engines
have the one before the last. What an update costs beside the transfer (10 ms of pause for 4B on an
H200) is not in them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from sluice.api import WeightSync
from sluice_trainer.weights.chain import LARGEST_PIECE, piece_bytes

BUCKET_BYTES = WeightSync().bucket_mi_b << 20
MODELS = {"Qwen3-4B, 8 GB": 8.0e9, "Qwen3-30B-A3B, 61 GB": 61.0e9}
LINKS = {"NVLink, 360 GB/s": 360e9, "InfiniBand 400 Gb/s, 50 GB/s": 50e9}
ENGINES = (1, 3, 8, 64, 1000)
# Seconds of a piece besides its transfer: starting two operations, and one waiting for the other.
# Measured with three engines, from what a bucket of 1 GiB takes in 4, 8 and 16 pieces.
PIECE_SECONDS = 130e-6
# Buckets that the trainer keeps for engines that may miss them.
_IN_HAND = 2


def direct(engines: int, size: float, bandwidth: float) -> float:
    """Seconds to send to one engine after another over one link. size: bytes of the weights."""
    return engines * size / bandwidth


def chain(
    engines: int,
    size: float,
    bandwidth: float,
    *,
    bucket: float = BUCKET_BYTES,
    piece: float = 0.0,
    piece_seconds: float = PIECE_SECONDS,
) -> float:
    """Seconds until the last engine of a chain has all weights.

    piece: bytes (0: what the trainer takes for so many engines); piece_seconds: of a piece beside
    its moving, at each engine that passes on.
    """
    piece = piece or piece_bytes(engines)
    behind = (engines - 1) * (piece / bandwidth + piece_seconds)
    passing_on = piece_seconds if engines > 1 else 0.0
    begun: list[float] = []
    sent = 0.0
    ends: list[float] = []
    for number in range(math.ceil(size / bucket)):
        part = min(bucket, size - number * bucket)
        seconds = part / bandwidth + math.ceil(part / piece) * passing_on
        kept = ends[number - _IN_HAND] if number >= _IN_HAND else 0.0
        begun.append(max(sent, kept))
        sent = begun[-1] + seconds
        ends.append(sent + behind)
    return ends[-1]


def tree(
    engines: int,
    size: float,
    bandwidth: float,
    *,
    piece: float = float(LARGEST_PIECE),
    piece_seconds: float = PIECE_SECONDS,
) -> float:
    """Seconds of a tree of two branches: each engine that passes on sends everything twice."""
    branches = 1 if engines <= 2 else 2
    levels = math.ceil(math.log2(engines + 1)) - 1
    return branches * (size / bandwidth + levels * (piece / bandwidth + piece_seconds))


def rows(
    bandwidth: float, engines: Sequence[int], size: float, piece_seconds: float
) -> list[tuple[int, float, float, float]]:
    """Engines, and seconds one after another, in a chain and in a tree."""
    return [
        (
            count,
            direct(count, size, bandwidth),
            chain(count, size, bandwidth, piece_seconds=piece_seconds),
            tree(count, size, bandwidth, piece_seconds=piece_seconds),
        )
        for count in engines
    ]


def table(name: str, bandwidth: float, size: float, piece_seconds: float) -> None:
    print(f"\n{name}: computed, not measured; ms\n")
    print("| engines of a trainer rank | direct | chain | tree |")
    print("|---|---|---|---|")
    for count, *seconds in rows(bandwidth, ENGINES, size, piece_seconds):
        print(f"| {count:,} | " + " | ".join(f"{s * 1e3:,.0f}" for s in seconds) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", type=float, help="GB/s of one transfer, in place of both")
    parser.add_argument("--piece-us", type=float, default=PIECE_SECONDS * 1e6)
    options = parser.parse_args()
    gigabytes = options.bandwidth
    links = {f"{gigabytes:g} GB/s": gigabytes * 1e9} if gigabytes else LINKS
    for model, size in MODELS.items():
        for link, bandwidth in links.items():
            table(f"{model}, {link}", bandwidth, size, options.piece_us / 1e6)


if __name__ == "__main__":
    main()
