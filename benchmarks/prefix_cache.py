"""Cost of SGLang's prefix cache once memory is full: room for one token, by how many entries there
are.

    python benchmarks/prefix_cache.py [--entries 500,3200,10000] [--tokens 256]

SGLang's own `RadixCache`, without memory behind it, on a CPU. Beside it what our plugin does at
each update of an engine that is never idle: all entries that nobody uses go at once.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

REPEATS = 20
WORDS = 16


class NoMemory:
    device = torch.device("cpu")

    def free_segment(self, *_: object, **__: object) -> None:
        """There is nothing to give back."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", default="500,3200,10000")
    parser.add_argument("--tokens", type=int, default=256, help="of an entry")
    options = parser.parse_args()
    print("| entries | room for one token | all of them go |\n|---|---|---|")
    for entries in map(int, options.entries.split(",")):
        cache = RadixCache.create_simulated(mock_allocator=NoMemory())
        for _ in range(entries):
            words = array("q", random.choices(range(WORDS), k=options.tokens))
            cache.insert(InsertParams(key=RadixKey(words), value=torch.arange(options.tokens)))
        per_match = milliseconds(cache, REPEATS, 1) / REPEATS
        every = milliseconds(cache, 1, entries * options.tokens)
        assert cache.evictable_size() == 0
        print(f"| {entries:,} | {per_match:.2f} ms | {every:.0f} ms |")


def milliseconds(cache: RadixCache, times: int, tokens: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        cache.evict(EvictParams(num_tokens=tokens))
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    main()
