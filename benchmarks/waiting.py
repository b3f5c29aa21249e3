"""How long prompts should wait for each other at an engine that is kept full: computed, no engine
runs.

    python benchmarks/waiting.py [--requests 512]

An engine makes a token of each request that generates in one pass, and takes all prompts that wait
in another one, in which nobody generates; wherever a response ends, the next prompt comes. *none*:
prompts never wait, as in SGLang. *tenth*: until they are a tenth of what generates, which is
SGLang's `--prefill-delayer-queue-min-ratio 0.1`, for eight passes at most. *places*: the rule of
the plugin's gather.py, by the code that engines run; *places-16* may wait for 16 passes. *limit*:
prompts cost nothing. Thousand tokens a second. refill.py measures the same rules in an engine.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sluice.engines.sglang.plugin.__main__ import PATH

sys.path.append(str(PATH))
from sluice_sglang.prefill_batching import PrefillBatching

SECONDS = 60.0
SHARE = 0.1
Draw = Callable[[random.Random], int]
# A response's length. short: about 11 tokens. long-tailed: half below 40, 2 % of 2,048. Numbers: on
# average.
LENGTHS: dict[str, Draw] = {
    "short": lambda r: max(int(r.gauss(11, 4)), 1),
    "long-tailed": lambda r: (
        2048 if r.random() < 0.02 else max(int(r.lognormvariate(3.66, 0.9)), 1)
    ),
    "300": lambda r: int(r.expovariate(1 / 300)) + 1,
    "1000": lambda r: int(r.expovariate(1 / 1000)) + 1,
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a pass. prompt, token: of any size; per_sequence: added for each request."""

    prompt: float
    token: float
    per_sequence: float = 1e-5


COSTS = {
    "a small model, prompts by graphs": Costs(0.006, 0.004),
    "prompts kernel by kernel": Costs(0.020, 0.004),
    "a larger model": Costs(0.020, 0.015),
}


class Tenth(PrefillBatching):
    def waits(self, waiting: int, running: int) -> bool:
        return 0 < waiting < running * SHARE and self.waited < self.max_passes


RULES: dict[str, Callable[[], PrefillBatching]] = {
    "none": lambda: PrefillBatching(0),
    "tenth": lambda: Tenth(8),
    "places": lambda: PrefillBatching(8),
    "places-16": lambda: PrefillBatching(16),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=512)
    options = parser.parse_args()
    print(f"| passes | lengths | {' | '.join(RULES)} | limit |")
    print("|---" * (3 + len(RULES)) + "|")
    for cost_name, costs in COSTS.items():
        for length_name, draw in LENGTHS.items():
            rates = [rate(rule(), options.requests, draw, costs) for rule in RULES.values()]
            rates.append(options.requests / (costs.token + costs.per_sequence * options.requests))
            row = " | ".join(f"{requests_per_second / 1000:.1f}" for requests_per_second in rates)
            print(f"| {cost_name} | {length_name} | {row} |", flush=True)


def rate(rule: PrefillBatching, requests: int, draw: Draw, costs: Costs) -> float:
    """Tokens a second."""
    chance = random.Random(0)
    running = list(begun(chance, draw, requests))
    waiting: list[int] = []
    seconds = tokens = 0.0
    while seconds < SECONDS:
        if waiting and not rule.one_more(len(waiting), len(running)):
            seconds += costs.prompt + costs.per_sequence * len(waiting)
            tokens += len(waiting)  # each gets its first one
            running += [left - 1 for left in waiting]
            waiting = []
        else:
            seconds += costs.token + costs.per_sequence * len(running)
            tokens += len(running)
            running = [left - 1 for left in running]
        waiting += [draw(chance) for left in running if left <= 0]
        running = [left for left in running if left > 0]
    return tokens / seconds


def begun(chance: random.Random, draw: Draw, requests: int) -> Iterator[int]:
    """Tokens that are left of the requests of a full engine: a long one is met more often."""
    lengths = [draw(chance) for _ in range(10_000)]
    for length in chance.choices(lengths, weights=lengths, k=requests):
        yield int(length * chance.random()) + 1


if __name__ == "__main__":
    main()
